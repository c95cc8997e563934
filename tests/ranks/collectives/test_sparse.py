"""Sparse codecs through the engine on two real ranks: cut at granules, equal on both ranks, mass conserved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dtcomm
from dtcomm import algorithms
from tests.support.rank_tests import on_ranks
from tests.unit.collectives.call_by_name import require_alike

SPECS = ("topk:ratio=0.01", "topk:ratio=0.2,values=int4", "randk:ratio=0.05")


@pytest.mark.parametrize(
    "algorithm", sorted({*algorithms.available("all_reduce")} & {"one_shot", "two_shot", "ring"})
)
@pytest.mark.parametrize("spec", SPECS)
@on_ranks(2)
def test_feedback_conserves_mass(rank: int, n: int, spec: str, algorithm: str) -> None:
    """Check in each step that the result plus all new residuals equals all inputs plus all old residuals."""
    generator = torch.Generator().manual_seed(rank)
    for count in (1, 4096, 70_001, 1_000_003):
        residual = torch.zeros(count)
        for _ in range(3):
            x = torch.randn(count, generator=generator)
            expected_mass = x.double() + residual
            dtcomm.all_reduce(x, codec=spec, algorithm=algorithm, residual=residual)
            require_alike(x, (spec, algorithm, count))
            mass = residual.double() + (x.double() if rank == 0 else 0)
            for total in (expected_mass, mass):
                dist.all_reduce(total)
            assert torch.allclose(mass, expected_mass, rtol=0, atol=3e-5), (spec, algorithm, count)
            assert 0 < int((x != 0).sum()) <= max(1, count)


@pytest.mark.parametrize("spec", SPECS)
@on_ranks(2)
def test_all_reduce_without_feedback(rank: int, n: int, spec: str) -> None:
    """Without a residual topk gives the largest sums, and randk is right on average."""
    count = 8192
    x = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    exact = x.clone()
    dist.all_reduce(exact)
    mean = torch.zeros(count, dtype=torch.float64)
    steps = 40
    for step in range(steps):
        result = x.clone()
        dtcomm.all_reduce(result, codec=spec, algorithm="two_shot", seed=step)
        require_alike(result, spec)
        mean += result.double() / steps
    if spec.startswith("randk"):
        assert abs(float((mean - exact).mean())) < 5 * 20 / (count * steps) ** 0.5 * float(
            exact.abs().mean() + 1
        )
    else:
        assert torch.equal(mean.float(), result)
