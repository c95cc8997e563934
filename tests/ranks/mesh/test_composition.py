"""Several kinds of parallelism on one mesh, compressed on every axis: examples/train_gpt_mesh.py on small models.

Ranks are fresh processes, because torch caches meshes and their groups per process.
"""

from __future__ import annotations

import runpy
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "train_gpt_mesh.py")
TINY = "--width 32 --layers 2 --context 32 --batch 8 --steps 4"
FOUR = {
    "dp x tp": "--dp 2 --tp 2",
    "fsdp x tp": "--fsdp 2 --tp 2",
    "dp x pp": "--dp 2 --pp 2 --schedule gpipe --micro 2",
    "fsdp x pp": "--fsdp 2 --pp 2 --micro 2",
}
MORE = {
    "pp x tp, zero-bubble": "--pp 2 --tp 2 --schedule zero-bubble --layers 4 --micro 4",
    "fsdp x cp": "--fsdp 2 --cp 2",
    "ep x dp": "--ep 2 --dp 2 --experts 4",
}
EIGHT = {
    "dp x fsdp x tp": "--dp 2 --fsdp 2 --tp 2",
    "ep x dp x tp": "--ep 2 --dp 2 --tp 2 --experts 4",
    "fsdp x tp x pp": "--fsdp 2 --tp 2 --pp 2 --schedule interleaved",
}


def train(arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = runpy.run_path(EXAMPLE)["run"](arguments.split())
    return result


def train_all(rank: int, ranks: int, runs: list[str]) -> list[dict[str, Any]]:
    return [train(run) for run in runs]


def check(results: list[dict[str, Any]], reference: dict[str, Any], name: str, exact: bool) -> None:
    """Check the runs off, none and int8 of one combination."""
    off, none, int8 = results
    if exact:
        assert none["losses"] == off["losses"] and none["norms"] == off["norms"], name
    assert none["losses"] == pytest.approx(off["losses"], rel=1e-4), name
    assert none["losses"] == pytest.approx(reference["losses"], rel=1e-3), name
    assert none["norms"] == pytest.approx(reference["norms"], rel=1e-2), name
    assert int8["losses"] != none["losses"]
    assert int8["losses"] == pytest.approx(none["losses"], rel=0.03), name
    assert none["held_out"] == pytest.approx(reference["held_out"], rel=1e-3), name
    assert int8["held_out"] == pytest.approx(none["held_out"], rel=0.03), name
    axes = {axis.strip() for axis in name.partition(",")[0].split(" x ")} - {"ep", "cp"}
    for axis in axes:
        sent, plain = int8["bytes"][axis]
        assert 0 < sent < 0.5 * plain, (name, axis)


@pytest.mark.slow
@pytest.mark.parametrize("combinations", [FOUR, MORE], ids=["common", "more"])
def test_four_ranks_train_as_one_does(combinations: dict[str, str]) -> None:
    variants = {
        key for axes in combinations.values() for key in ("--experts 4", "--layers 4", "") if key in axes
    }
    references = dict(
        zip(
            sorted(variants),
            run_ranks(train_all, 1, [f"{TINY} --codec none {key}" for key in sorted(variants)])[0],
            strict=True,
        )
    )
    runs = [
        f"{TINY} {axes} --codec {codec}"
        for axes in combinations.values()
        for codec in ("off", "none", "int8")
    ]
    results = run_ranks(train_all, 4, runs, timeout=600, fresh=True)
    require_same(results, runs)
    for number, (name, axes) in enumerate(combinations.items()):
        key = next((key for key in ("--experts 4", "--layers 4") if key in axes), "")
        # With more than two ranks on an axis torch's sums have another order.
        exact = name not in ("fsdp x cp", "ep x dp")
        check(results[0][3 * number : 3 * number + 3], references[key], name, exact)


def require_same(results: list[Any], runs: list[str]) -> None:
    """Require that all ranks have the same losses and norms, up to the order of a sum; the bytes they send differ."""
    for rank, of_rank in enumerate(results):
        for run, actual, expected in zip(runs, of_rank, results[0], strict=True):
            for key in ("losses", "norms"):
                assert actual[key] == pytest.approx(expected[key], rel=1e-6), (rank, run, key)


def options_of_training(rank: int, ranks: int, folder: str) -> None:
    axes = f"{TINY} --dp 2 --tp 2"
    plain = train(f"{axes} --codec int8")
    recomputed = train(f"{axes} --codec int8 --checkpoint")
    assert recomputed["losses"] == plain["losses"] and recomputed["norms"] == plain["norms"]
    # Twice as many sequences in halves are the same mean; blocks of the codec are not.
    accumulated = train(f"{axes} --codec none --accumulate 2")
    assert accumulated["losses"] == pytest.approx(train(f"{axes} --codec none")["losses"], rel=1e-4)
    half = train(f"{axes} --codec int8 --bf16")
    assert half["losses"] == pytest.approx(plain["losses"], rel=0.02) and half["losses"] != plain["losses"]
    # A run that is cut into two continues bit for bit.
    for other in (
        axes,
        f"{TINY} --fsdp 2 --tp 2",
        f"{TINY} --dp 2 --pp 2 --micro 2 --schedule gpipe",
        f"{TINY} --fsdp 2 --pp 2 --micro 2",
    ):
        whole = train(f"{other} --codec int8")
        first = train(f"{other} --codec int8 --steps 2 --save {folder}")
        second = train(f"{other} --codec int8 --resume {folder}")
        assert first["losses"] + second["losses"] == whole["losses"], other
        assert first["norms"] + second["norms"] == whole["norms"], other


@pytest.mark.slow
def test_recomputation_accumulation_bf16_and_resuming(tmp_path: Path) -> None:
    run_ranks(options_of_training, 4, str(tmp_path), timeout=600, fresh=True)


@on_ranks(2, timeout=120, fresh=True)
def test_sequences_are_padded_and_what_does_not_fit_is_refused(rank: int, ranks: int) -> None:
    # 30 characters do not divide into 2 * 2 chunks: they are padded, and the loss is that of the 30.
    whole = train(f"{TINY} --dp 2 --context 30 --codec none")
    padded = train(f"{TINY} --cp 2 --context 30 --codec none")
    assert padded["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    for arguments, message in (
        ("--dp 3", "mesh: dp=3 needs 3 ranks, the job has 2"),
        ("--tp 2 --heads 3", "heads=3: not divisible by tp=2; valid tp: 1, 3"),
        ("--pp 2 --layers 1", "pp=2: there are 1 layers"),
        ("--ep 2 --experts 3", "experts=3: not divisible by ep=2"),
        ("--ep 2", "--ep: needs --experts"),
        ("--dp 2 --batch 3", r"batch=3: not divisible by dp \* fsdp \* ep=2"),
        ("--pp 2 --codec int2", "int2 loses 66% of the activations"),
        ("--tp 2 --codec int2", "int2 loses 66% of the activations"),
        ("--fsdp 2 --codec int2", "int2"),
        ("--pp 2 --schedule interleaved --layers 3", "stages=4: there are 3 layers; valid: 1 to 3 stages"),
        ("--pp 2 --micro 3", "--batch 8: not divisible by the 3 micro-batches"),
        ("--pp 2 --accumulate 2", "--accumulate: with --pp"),
    ):
        with pytest.raises(ValueError, match=message):
            train(f"{TINY} {arguments}")


@pytest.mark.slow
@on_ranks(4, timeout=600, fresh=True)
def test_compiled_blocks_train_alike(rank: int, ranks: int) -> None:
    for axes in ("--dp 2 --tp 2", "--fsdp 2 --tp 2"):
        run = f"{TINY} {axes} --codec int8"
        torch._dynamo.reset()
        assert train(f"{run} --compile aot_eager")["losses"] == pytest.approx(train(run)["losses"], rel=1e-3)


@pytest.mark.slow
def test_eight_ranks_train_within_the_spread_of_seeds() -> None:
    steps = "--width 32 --layers 4 --context 32 --batch 16 --micro 4 --steps 8"
    seeds = run_ranks(
        train_all, 1, [f"{steps} --codec none --seed {seed}" for seed in range(3)], timeout=600
    )[0]
    experts = run_ranks(train_all, 1, [f"{steps} --codec none --experts 4"], timeout=600)[0][0]
    last = [statistics.mean(run["losses"][-4:]) for run in seeds]
    spread = max(last) - min(last)
    runs = [f"{steps} {axes} --codec {codec}" for axes in EIGHT.values() for codec in ("none", "int8")]
    results = run_ranks(train_all, 8, runs, timeout=600, fresh=True)
    require_same(results, runs)
    for number, (name, axes) in enumerate(EIGHT.items()):
        none, int8 = results[0][2 * number : 2 * number + 2]
        reference = experts if "--experts" in axes else seeds[0]
        assert none["losses"][:4] == pytest.approx(reference["losses"][:4], rel=1e-3), name
        final = [statistics.mean(run["losses"][-4:]) for run in (none, int8, reference)]
        assert abs(final[0] - final[2]) < spread, (name, final, spread)
        assert abs(final[1] - final[0]) < spread, (name, final, spread)
