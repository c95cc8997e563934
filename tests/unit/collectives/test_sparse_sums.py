"""Sparse sums of all ranks in one thread: in every algorithm, results and residuals together conserve mass."""

from __future__ import annotations

import pytest
import torch

from bench.common.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.kernels import counter_rng, local_tasks, ops
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from tests.unit.collectives.local_multi_stage import plan_of, reduce_all

SPARSE = ("topk:ratio=0.01", "topk:ratio=0.3,values=fp32", "randk:ratio=0.05", "randk:ratio=0.2,values=int4")
SHARED = (
    "randk:ratio=0.05,positions=shared",
    "randk:ratio=0.2,positions=shared,values=fp32",
    "randk:ratio=0.1,positions=shared,values=int8",
)


def gaussians(ranks: int, numel: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(ranks)]


def reduced(
    spec: str,
    inputs: list[torch.Tensor],
    algorithm: str,
    *,
    residuals: list[torch.Tensor] | None = None,
    op: str = "sum",
    seed: int = 3,
) -> tuple[list[torch.Tensor], list[int]]:
    """Run all_reduce on copies on every rank; return the results and the bytes that each rank sent."""
    ranks, numel = len(inputs), inputs[0].numel()
    tensors = [x.clone() for x in inputs]
    all_residuals = residuals or [None] * ranks
    buffers = [[Buffers(x, x, r)] for x, r in zip(tensors, all_residuals, strict=True)]
    world = Simulation(ranks=ranks, seed=seed, delay=0.3)
    hosts = (1, ranks - 1)
    if codec(spec).needs_agreement:
        plans = [
            plan_of(
                spec, [numel], torch.float32, rank=r, ranks=ranks, algorithm=algorithm, op=op, hosts=hosts
            )
            for r in range(ranks)
        ]
        outcomes, _ = reduce_all(world, plans, buffers, seed=seed)
    else:
        levels = hosts if algorithm.startswith("hierarchical") else None
        schedule = algorithms.build(algorithm, "all_reduce", ranks, hosts=levels)
        shape = OpSpec("all_reduce", op, (TensorSpec(numel, torch.float32, codec(spec)),), algorithm)
        calls = [[Operation(shape=shape, schedule=schedule, buffers=part, seed=seed)] for part in buffers]
        outcomes = run_simulated(world, calls)
    assert {outcome.status for outcome in outcomes} == {"done"}
    for x in tensors[1:]:
        assert torch.equal(x.view(torch.int32), tensors[0].view(torch.int32))
    return tensors, [outcome.wire_bytes for outcome in outcomes]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("spec", SPARSE)
def test_one_shot_sums_every_decoded_payload(spec: str, ranks: int) -> None:
    """One shot gives the fp32 sum, in rank order, of the decoded payloads: each is encoded exactly once."""
    numel = 9000
    inputs = gaussians(ranks, numel, seed=ranks)
    (got, *_), _ = reduced(spec, inputs, "one_shot", seed=11)
    payloads = [ops.encode(spec, x, key=counter_rng.mix_key(11, rank, 0)) for rank, x in enumerate(inputs)]
    assert torch.equal(got, ops.reduce(spec, payloads, numel))
    decoded = [ops.decode(spec, payload, numel) for payload in payloads]
    sent = torch.stack([values != 0 for values in decoded]).any(dim=0)
    assert not (got != 0)[~sent].any()  # sums may be zero
    assert int(sent.sum()) > max(int((values != 0).sum()) for values in decoded)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("algorithm", algorithms.available("all_reduce"))
@pytest.mark.parametrize("spec", (*SPARSE, *SHARED))
def test_feedback_conserves_mass(spec: str, algorithm: str, op: str) -> None:
    """result (x ranks for avg) + new residuals = inputs + old residuals, step after step."""
    ranks, numel = 3, 9000
    residuals = gaussians(ranks, numel, seed=1)
    for step in range(3):
        inputs = gaussians(ranks, numel, seed=step)
        expected_mass = torch.stack(inputs).double().sum(0) + torch.stack(residuals).double().sum(0)
        (got, *_), _ = reduced(spec, inputs, algorithm, residuals=residuals, op=op, seed=step)
        mass = got.double() * (ranks if op == "avg" else 1) + torch.stack(residuals).double().sum(0)
        assert torch.allclose(mass, expected_mass, rtol=0, atol=1e-4), (mass - expected_mass).abs().max()


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("algorithm", algorithms.available("all_reduce"))
def test_shared_positions_are_linear(algorithm: str, ranks: int) -> None:
    """Every algorithm gives randk of the sum: no hop draws new positions, and no more than k elements are sent."""
    spec, numel = SHARED[1], 9000
    inputs = [torch.randint(-99, 100, (numel,)).float() for _ in range(ranks)]  # sums of integers are exact
    (got, *_), sent = reduced(spec, inputs, algorithm, seed=21)
    total = torch.stack(inputs).sum(0)
    encoded_sum = ops.encode(spec, total, key=local_tasks.shared_key(21))
    assert torch.equal(got, ops.decode(spec, encoded_sum, numel))
    levels = (1, ranks - 1) if algorithm == "hierarchical" else None
    schedule = algorithms.build(algorithm, "all_reduce", ranks, hosts=levels)
    assert sent == list(schedule.bytes_on_wire(numel, codec(spec)))
    kept_elements = codec(spec).kept_in(numel)  # type: ignore[attr-defined]
    assert sent == list(schedule.bytes_on_wire(kept_elements, codec("none")))
    averaged, _ = reduced(spec, inputs, algorithm, op="avg", seed=21)
    assert torch.allclose(averaged[0] * ranks, got)


def test_shared_positions_are_unbiased() -> None:
    """The mean over seeds is the sum within five standard deviations; all elements are drawn about equally often."""
    ranks, numel, steps = 3, 4096, 400
    for spec in SHARED[:2]:
        inputs = gaussians(ranks, numel, seed=8)
        total = torch.stack(inputs).double().sum(0)
        mean, drawn = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel)
        for seed in range(steps):
            (got, *_), _ = reduced(spec, inputs, "two_shot", seed=seed)
            mean += got.double() / steps
            drawn += got != 0
        share = codec(spec).kept / 4096  # type: ignore[attr-defined]
        deviation = total.abs() * ((1 / share - 1) / steps) ** 0.5
        off = ((mean - total) / (deviation + 1e-9)).clamp(-50, 50)
        assert abs(float(off.mean())) < 5 / numel**0.5
        assert 0.9 < float(off.std()) < 1.1
        assert abs(float(drawn.mean()) / steps - share) < 1e-3
        assert float((drawn / steps - share).abs().max()) < 5 * (share / steps) ** 0.5


def test_non_finite_value_reaches_every_rank_and_leaves_residuals_unchanged() -> None:
    for spec in SHARED[:2]:
        inputs = gaussians(3, 9000, seed=5)
        inputs[1][5000] = torch.nan
        residuals = [torch.full((9000,), 0.5) for _ in range(3)]
        (got, *_), _ = reduced(spec, inputs, "ring", residuals=residuals)
        assert got[4096:8192].isnan().all() and not got[:4096].isnan().any() and not got[8192:].isnan().any()
        assert torch.equal(residuals[1][4096:8192], torch.full((4096,), 0.5))
        assert all(torch.isfinite(residual).all() for residual in residuals)


@pytest.mark.parametrize("algorithm", algorithms.available("reduce_scatter"))
@pytest.mark.parametrize("spec", SHARED[:2])
def test_reduce_scatter_conserves_mass(spec: str, algorithm: str) -> None:
    ranks, numel = 3, 5000
    inputs, residuals = gaussians(ranks, numel * ranks, seed=2), gaussians(ranks, numel * ranks, seed=3)
    expected_mass = torch.stack(inputs).double().sum(0) + torch.stack(residuals).double().sum(0)
    outputs = [torch.empty(numel) for _ in range(ranks)]
    plans = [
        plan_of(
            spec,
            [numel],
            torch.float32,
            rank=rank,
            ranks=ranks,
            collective="reduce_scatter",
            algorithm=algorithm,
            hosts=(1, 2),
        )
        for rank in range(ranks)
    ]
    buffers = [[Buffers(x, out, r)] for x, out, r in zip(inputs, outputs, residuals, strict=True)]
    reduce_all(Simulation(ranks=ranks, seed=4), plans, buffers)
    mass = torch.cat(outputs).double() + torch.stack(residuals).double().sum(0)
    assert torch.allclose(mass, expected_mass, rtol=0, atol=1e-4)
