"""Several hosts: sums cross them once, in specs ``A/B`` with codec B. DTCOMM_HOST_ID puts four ranks on two hosts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtcomm import algorithms, collectives, ddp
from dtcomm.codecs import codec, parse_levels
from dtcomm.compress.guard import Guard
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD
from tests.unit.ddp.models import SMALL_BUCKETS, batch, gradients, local_gradients, train, wrapped

RANKS, HOSTS = 4, ((0, 1), (2, 3))
MATRICES = ("first.weight", "branch.weight", "last.weight")
NUMEL = 48 * 48


def put_on_two_hosts(rank: int) -> None:
    os.environ["DTCOMM_HOST_ID"] = f"host {rank // 2}"


def require_alike(tensors: dict[str, torch.Tensor]) -> None:
    """Check that all ranks hold the same bits."""
    own = torch.cat([tensor.flatten().float() for tensor in tensors.values()])
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, own)
    assert all(torch.equal(own, other) for other in all_ranks)


def backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    model(batch(rank, step)).square().mean().backward()


def compare_to_all_reduce(rank: int, world_size: int, spec: str, algorithm: str, runtime: str) -> float:
    """Compare five steps with calls of `all_reduce`; return the largest relative gap in mass."""
    put_on_two_hosts(rank)
    os.environ["DTCOMM_RUNTIME"] = runtime
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, spec, feedback=True, algorithm=algorithm)
    named_algorithm = "hierarchical" if algorithm == "direct" else algorithm
    residuals = {name: torch.zeros(NUMEL) for name in MATRICES}
    gap = 0.0
    for step in range(5):
        with local_gradients(model) as local:
            backward(model, rank, step)
        reduced, stored = gradients(model), state.state_dict()["residuals"]
        require_alike(reduced)
        for name, gradient in local.items():
            residual = residuals.get(name)
            contributed = gradient.double().flatten()
            if residual is not None:
                contributed += residual
            expected = gradient.clone()
            collectives.all_reduce(
                expected,
                "avg",
                codec="none" if residual is None else spec,
                algorithm=named_algorithm,
                seed=step,
                residual=residual,
            )
            assert torch.equal(reduced[name], expected), (step, name)
            if residual is None:
                assert name not in stored
                continue
            assert torch.equal(stored[name], residual), (step, name)
            assert residual.any(), (step, name)
            arrived = world_size * expected.double().flatten()
            for tensor in (contributed, stored_now := residual.double()):
                dist.all_reduce(tensor)
            gap = max(gap, float((contributed - arrived - stored_now).abs().max() / contributed.abs().max()))
    info = collectives.info()
    assert (info["hosts"], info["runtime"]) == (2, runtime)
    return gap


@pytest.mark.parametrize(
    ("spec", "algorithm", "runtime"),
    [
        ("int8", "direct", "native"),
        ("int8/int4", "direct", "native"),
        ("int8/int4", "direct", "process_group"),
        ("none/int4:round=stochastic", "direct", "native"),
        ("int8/topk:ratio=0.1", "direct", "native"),
        ("fp16/int8", "hierarchical:ring/tree", "native"),
    ],
)
def test_buckets_equal_all_reduce_and_conserve_mass(spec: str, algorithm: str, runtime: str) -> None:
    assert max(run_ranks(compare_to_all_reduce, RANKS, spec, algorithm, runtime)) < 2e-6


def count_bytes(rank: int, world_size: int, spec: str, runtime: str) -> tuple[int, int, int | None, int]:
    """Return the wire and the uncompressed bytes of three steps of a model of two matrices of 128 x 128.

    And what left the host, by the report, and what this rank sent to the other host, by `info`.
    """
    put_on_two_hosts(rank)
    os.environ["DTCOMM_RUNTIME"] = runtime
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    model = DistributedDataParallel(layers)
    state = ddp.compress(model, spec, guard=None)
    for _ in range(3):
        model(torch.randn(4, 128)).square().mean().backward()
    report = state.report()
    (row,) = report.rows
    assert (row.codec, len(row.names), row.relative_error is None) == (spec, 2, False)
    assert (row.wire_bytes, row.plain_bytes) == (report.wire_bytes, report.plain_bytes)
    assert sum(bucket.wire_bytes for bucket in report.by_message) <= report.wire_bytes
    assert f"gradients  {spec} " in str(report)
    left = collectives.info().get("leaving_bytes", 0)
    return report.wire_bytes, report.plain_bytes, report.leaving_bytes, left


@pytest.mark.parametrize(
    ("spec", "runtime"), [("int8/int4", "native"), ("none/int8", "process_group"), ("int8", "process_group")]
)
def test_the_report_counts_the_bytes_of_both_levels(spec: str, runtime: str) -> None:
    schedule = algorithms.build("hierarchical", "all_reduce", RANKS, hosts=HOSTS)
    inside, between = parse_levels(spec)
    codecs = [inside, between or inside]
    numel, messages = 128 * 128, 3 * 2
    expected_wire = schedule.bytes_on_wire(numel, codecs, torch.float32)
    expected_plain = schedule.bytes_on_wire(numel, codec("none"), torch.float32)
    leaving = schedule.bytes_leaving(HOSTS, numel, codecs, torch.float32)
    results = run_ranks(count_bytes, RANKS, spec, runtime)
    for rank, (wire_bytes, plain_bytes, left_host, _) in enumerate(results):
        assert left_host == messages * leaving[rank // 2]
        assert wire_bytes == messages * expected_wire[rank]
        # The chunks are equal here, so that the ratio of whole payloads is exact.
        assert plain_bytes == messages * expected_plain[rank]
    if runtime == "process_group":  # it counts by rank
        own = [left for *_, left in results]
        assert [own[0] + own[1], own[2] + own[3]] == [messages * left for left in leaving]


def train_on_one_host(rank: int, world_size: int, spec: str) -> tuple[list[dict[str, torch.Tensor]], int]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, spec)
    return train(model, rank, range(4)), state.report().wire_bytes


def test_only_the_first_codec_is_used_on_one_host() -> None:
    (levels, levels_bytes), *_ = run_ranks(train_on_one_host, 3, "int8/int4")
    (alone, alone_bytes), *_ = run_ranks(train_on_one_host, 3, "int8")
    assert levels_bytes == alone_bytes
    for with_levels, without in zip(levels, alone, strict=True):
        assert all(torch.equal(gradient, without[name]) for name, gradient in with_levels.items())


def compare_resumed(rank: int, world_size: int) -> None:
    """Check that a run resumed with other buckets ends with the bits of an uninterrupted one."""
    put_on_two_hosts(rank)
    uninterrupted, interrupted = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    ddp.compress(uninterrupted, "int8/int4:round=stochastic", feedback=True)
    first = ddp.compress(interrupted, "int8/int4:round=stochastic", feedback=True)
    train(uninterrupted, rank, range(6))
    train(interrupted, rank, range(3))
    saved = first.state_dict()
    assert set(saved["residuals"]) == set(MATRICES)
    continued = DistributedDataParallel(interrupted.module)  # one bucket
    second = ddp.compress(continued, "int8/int4:round=stochastic", feedback=True)
    second.load_state_dict(saved)
    train(continued, rank, range(3, 6))
    for name, parameter in uninterrupted.module.named_parameters():
        assert torch.equal(parameter, dict(continued.module.named_parameters())[name]), name


def test_a_resumed_run_continues_bit_for_bit_with_other_buckets() -> None:
    run_ranks(compare_resumed, RANKS)


def train_guarded(rank: int, world_size: int) -> list[str]:
    put_on_two_hosts(rank)
    model = wrapped(**SMALL_BUCKETS)
    guard = Guard(cosine=1 - 1e-12, window=1, on_harm="finer")
    state = ddp.compress(model, "int8/int4", guard=guard)
    codecs = []
    for step in range(8):
        backward(model, rank, step)
        require_alike(gradients(model))
        codecs.append(next(row.codec for row in state.report().rows if "first.weight" in row.names))
    assert {event.kind for event in state.events} == {"harm"}
    return codecs


def test_the_guard_makes_both_levels_finer() -> None:
    for codecs in run_ranks(train_guarded, RANKS):
        assert list(dict.fromkeys(codecs))[:3] == ["int8/int4", "fp16/int8", "none/fp16"]


def train_with_mixed_policy(rank: int, world_size: int, options: dict[str, Any]) -> set[str]:
    put_on_two_hosts(rank)
    model = wrapped(**SMALL_BUCKETS)
    spec = "name=branch* -> powersgd:rank=2; name=first* -> int8; ndim<2 -> none; * -> int8/int4"
    state = ddp.compress(model, spec, **options)
    for step in range(4):
        backward(model, rank, step)
        require_alike(gradients(model))
    return {row.codec for row in state.report().rows}


@pytest.mark.parametrize("options", [{}, {"feedback": "ef21"}, {"residual": "int8"}], ids=str)
def test_a_policy_mixes_levels_with_other_schemes(options: dict[str, Any]) -> None:
    for codecs in run_ranks(train_with_mixed_policy, RANKS, options):
        assert codecs == {"powersgd:rank=2", "int8", "none", "int8/int4"}


def average_with_local_sgd(rank: int, world_size: int) -> float:
    put_on_two_hosts(rank)
    torch.manual_seed(rank)
    model = nn.Linear(64, 64)
    local = LocalSGD(model, every=1, codec="int8/int4")
    for _ in range(3):
        with torch.no_grad():
            model.weight += 0.01 * torch.randn(64, 64)
        local.step()
    require_alike(dict(model.named_parameters()))
    report = local.report()
    assert report.leaving_bytes is not None and 0 < report.leaving_bytes < report.plain_bytes
    (row,) = [row for row in report.rows if row.codec == "int8/int4"]
    return row.plain_bytes / row.wire_bytes


def test_local_sgd_takes_a_codec_for_each_level() -> None:
    for ratio in run_ranks(average_with_local_sgd, RANKS):
        assert 5.0 < ratio < 6.5


def check_refusals(rank: int, world_size: int) -> None:
    for algorithm in ("two_shot", "ring"):
        with pytest.raises(
            ValueError, match=f"int8/int4 names a codec for each level, and '{algorithm}' has no"
        ):
            ddp.compress(wrapped(), "int8/int4", algorithm=algorithm)


def test_two_level_specs_are_refused_by_flat_algorithms() -> None:
    run_ranks(check_refusals, 1)
