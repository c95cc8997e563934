"""Operations on several threads: the same bits as on one, in seeded orders; and how many threads a rank uses."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench.common.virtual_ranks import Simulation, run_simulated
from dtcomm import _C, env
from dtcomm.codecs import codec
from dtcomm.runtime.native import copy_policy
from dtcomm.runtime.types import OpSpec, TensorSpec
from tests.unit.runtime.simulated_cases import (
    CASES,
    CODECS,
    Case,
    bits,
    calls_per_rank,
    make_case,
    require_finished,
)

NUMEL = 150_001  # several parts in each piece, and an odd tail
PIECE = 512 * 1024


def run_case(
    seed: int, count: int, collective: str, algorithm: str, spec: str, place: str, between: str | None = None
) -> Case:
    """Run a collective on simulated ranks that use ``count`` threads."""
    rng = random.Random(seed)
    case = make_case(
        rng,
        3,
        collective,
        algorithm,
        [spec],
        [NUMEL // (3 if collective in ("all_to_all", "scatter", "reduce_scatter") else 1)],
        op="avg" if collective in ("all_reduce", "reduce_scatter") else "sum",
        feedback=place == "slots",
        place=place,
        integers=False,
    )
    single_copy = place == "pulled" and copy_policy.can_use_single_copy(case.shape)
    variants = _C.Variants(piece_bytes=PIECE, single_copy=single_copy, threads=count, parallel=count > 1)
    parts = case.shape.parts
    if between is not None:
        parts = tuple(part._replace(between=codec(between)) for part in parts)
    shape = case.shape._replace(parts=parts)
    case.operations[:] = [replace(operation, shape=shape, variants=variants) for operation in case.operations]
    world = Simulation(ranks=3, seed=seed, slot_bytes=2 * PIECE)
    require_finished(run_simulated(world, calls_per_rank([case])), world)
    return case


def require_same_bits(left: Case, right: Case) -> None:
    for mine, other in zip(left.operations, right.operations, strict=True):
        for ours, theirs in zip(mine.buffers, other.buffers, strict=True):
            for a, b in ((ours.output, theirs.output), (ours.residual, theirs.residual)):
                assert (a is None) == (b is None)
                assert a is None or b is None or torch.equal(bits(a), bits(b))


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_threads_change_no_bit_of_a_collective(collective: str, algorithm: str) -> None:
    for seed, place in enumerate(("slots", "shared", "pulled")):
        spec = "int8:round=stochastic" if place == "slots" else "none"
        one = run_case(seed, 1, collective, algorithm, spec, place)
        several = run_case(seed, 3, collective, algorithm, spec, place)
        require_same_bits(one, several)
    assert _C.helper_threads() >= 2


@pytest.mark.parametrize("spec", CODECS)
def test_threads_change_no_bit_of_a_codec(spec: str) -> None:
    for algorithm in ("two_shot", "ring"):
        one = run_case(5, 1, "all_reduce", algorithm, spec, "slots")
        for count in (2, 4):
            require_same_bits(one, run_case(5, count, "all_reduce", algorithm, spec, "slots"))


def test_threads_change_no_bit_between_hosts() -> None:
    """Sums over two codecs are taken in steps, each of which is shared out."""
    one = run_case(6, 1, "all_reduce", "hierarchical", "int8", "slots", "int4")
    require_same_bits(one, run_case(6, 3, "all_reduce", "hierarchical", "int8", "slots", "int4"))


def test_a_forked_child_starts_threads_of_its_own() -> None:
    one = run_case(7, 1, "all_reduce", "two_shot", "int8", "slots")
    run_case(7, 3, "all_reduce", "two_shot", "int8", "slots")
    assert _C.helper_threads() >= 2
    child = os.fork()
    if child == 0:
        try:
            before = _C.helper_threads()
            require_same_bits(one, run_case(7, 3, "all_reduce", "two_shot", "int8", "slots"))
            os._exit(0 if before == 0 and _C.helper_threads() == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("1000 100000", 1)])
def test_container_quota_limits_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, cores: int
) -> None:
    monkeypatch.setattr(copy_policy.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(copy_policy, "CPU_QUOTA", tmp_path / "cpu.max")
    copy_policy.CPU_QUOTA.write_text(quota)
    assert copy_policy.usable_cores() == cores


@pytest.mark.parametrize(
    ("affinities", "usable", "ranks", "expected"),
    [
        ([range(16)] * 2, 16, 2, 8),
        ([range(16)] * 2, 16, 8, 2),  # six ranks of the host belong to other communicators
        ([range(16)] * 2, 4, 2, 2),  # a container with a quota of four cores
        ([range(2), range(2, 8)], 8, 2, 2),  # a rank is pinned to two cores
        ([range(2)] * 4, 2, 4, 1),
    ],
)
def test_threads_are_the_cores_of_each_rank(
    affinities: list[range], usable: int, ranks: int, expected: int
) -> None:
    assert copy_policy.threads_per_rank(affinities, usable, ranks) == expected
    with mock.patch.dict(os.environ, DTCOMM_THREADS="3"):
        assert copy_policy.threads_per_rank(affinities, usable, ranks) == 3


@pytest.mark.parametrize(
    ("affinities", "ranks", "machine", "expected"),
    [
        ([range(2)] * 4, 4, 2, 0.5),
        ([range(2)] * 2, 4, 2, 0.5),  # two ranks of the host belong to other communicators
        ([range(8)] * 2, 4, 8, 2),
        ([range(1), range(1, 2)], 4, 2, 0.5),  # pinned, but there are more ranks than cores
        ([range(1), range(1, 2)], 4, 8, 1),  # pinned, and so are the others, as far as one can tell
        ([range(1), range(1)], 2, 8, 0.5),
        ([range(4), range(4, 8)], 2, 8, 4),
    ],
)
def test_ranks_take_turns_where_they_have_less_than_a_core(
    affinities: list[range], ranks: int, machine: int, expected: float
) -> None:
    assert copy_policy.cores_per_rank(affinities, ranks, machine) == expected


@pytest.mark.parametrize(
    ("value", "ranks", "expected"), [("8", 2, 8), ("", 2, 16), ("", 16, 1), ("none", 16, 1)]
)
def test_ranks_of_other_communicators_count(
    monkeypatch: pytest.MonkeyPatch, value: str, ranks: int, expected: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert copy_policy.local_ranks(ranks, 16) == expected


@pytest.mark.parametrize("value", ["-1", "two", "257", "1.5"])
def test_an_invalid_number_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DTCOMM_THREADS", value)
    with pytest.raises(ValueError, match=f"DTCOMM_THREADS='{value}': expected a whole number from 0 to 256"):
        env.get("DTCOMM_THREADS")


def spec_of(nbytes: int, collective: str = "all_reduce", algorithm: str = "two_shot") -> OpSpec:
    return OpSpec(collective, "sum", (TensorSpec(nbytes // 4, torch.float32, codec("none")),), algorithm, 0)


def test_what_uses_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel(nbytes: int, count: int, trials: bool = True) -> tuple[bool, bool]:
        variants = copy_policy.variants(spec_of(nbytes), 2, True, trials, count)
        return variants.parallel, variants.tries_parallel

    assert parallel(64 * 1024, 8) == (False, False)
    assert parallel(256 * 1024, 8) == (False, True)
    assert parallel(2**20, 8) == (True, True)
    assert parallel(2**20, 8, trials=False) == (True, False)
    assert parallel(2**28, 1) == (False, False)
    monkeypatch.setenv("DTCOMM_THREADS", "8")
    assert parallel(64 * 1024, 8) == (False, False)
    assert parallel(256 * 1024, 8) == (True, False)


def test_pieces_grow_with_the_threads() -> None:
    for count, scale in ((1, 1), (2, 2), (3, 2), (4, 4), (16, 4)):
        slot = copy_policy.slot_bytes(count)
        assert slot == scale * copy_policy.SLOT_BYTES
        large = copy_policy.variants(spec_of(2**26), 2, True, True, count)
        assert large.piece_bytes == slot // 2 and max(large.piece_sizes) == slot
        # A message is cut into as many pieces as overlap well.
        assert copy_policy.piece_bytes(spec_of(2**23), 2, count) <= 512 * 1024
