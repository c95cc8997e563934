"""Expert parallelism compared to the same experts on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtcomm import moe
from dtcomm.launch.ranks import run_ranks

TOKENS, FEATURES, EXPERTS = 13, 32, 6


def setting(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    tokens = TOKENS + 5 * rank
    x = torch.randn(tokens, FEATURES, generator=generator)
    # Expert 4 is never chosen; a token may choose the same expert twice.
    experts = torch.randint(0, EXPERTS - 1, (tokens, 2), generator=generator)
    experts[experts == 4] = 5
    weights = torch.rand(tokens, 2, generator=generator)
    shared = torch.Generator().manual_seed(99)
    return x, experts, weights, [torch.randn(FEATURES, 24, generator=shared) for _ in range(EXPERTS)]


def dense(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, matrices: list[torch.Tensor]
) -> torch.Tensor:
    every = torch.stack([torch.tanh(x @ matrix) for matrix in matrices])  # [experts, tokens, features]
    rows = torch.arange(len(x))[:, None]
    return (every[experts, rows] * weights[:, :, None]).sum(1)


def beside(rank: int, ranks: int, codec: str, tolerance: float) -> None:
    x, experts, weights, matrices = setting(rank)
    mine = EXPERTS // ranks
    local = [matrix.clone().requires_grad_() for matrix in matrices[rank * mine : (rank + 1) * mine]]
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    tokens, route = moe.dispatch(inputs[0], experts, EXPERTS, codec=codec, backward_codec=codec)
    assert sum(route.counts) == len(tokens) == sum(route.received)
    parts = [torch.tanh(part @ matrix) for part, matrix in zip(route.split(tokens), local, strict=True)]
    got = moe.combine(torch.cat(parts), route, inputs[1])
    theirs = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    whole = [matrix.clone().requires_grad_() for matrix in matrices]
    expected = dense(theirs[0], experts, theirs[1], whole)
    close(got, expected, tolerance)
    scale = torch.linspace(-1, 1, got.numel()).view_as(got)
    (got * scale).sum().backward()
    (expected * scale).sum().backward()
    for ours, reference in zip(inputs, theirs):
        close(ours.grad, reference.grad, tolerance)
    for number, matrix in enumerate(local):
        # An expert's gradient comes from all ranks' tokens.
        totals = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in whole]
        for each in totals:
            dist.all_reduce(each)
        mine_now = torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
        close(mine_now, totals[rank * mine + number], tolerance)


def close(got: Any, expected: Any, tolerance: float) -> None:
    error = float(torch.linalg.vector_norm(got - expected))
    size = float(torch.linalg.vector_norm(expected))
    assert error <= tolerance * max(size, 1e-6), (error, size)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_uncompressed_is_the_dense_mixture(ranks: int) -> None:
    run_ranks(beside, ranks, "none", 1e-5)


@pytest.mark.parametrize("codec", ["int8", "fp16", "bf16"])
def test_compressed_is_near(codec: str) -> None:
    run_ranks(beside, 2, codec, 0.06)


def empty(rank: int, ranks: int) -> None:
    """One rank has no tokens, and all tokens go to one expert."""
    x = torch.ones(0 if rank == 0 else 4, FEATURES)
    tokens, route = moe.dispatch(x, torch.full((len(x),), 3), 4)
    assert route.counts == ((0, 0) if rank == 0 else (0, 4))
    y = moe.combine(tokens * 2, route)
    assert torch.equal(y, x * 2)


def test_no_tokens_and_one_expert() -> None:
    run_ranks(empty, 2)


def refusals(rank: int, ranks: int) -> None:
    x = torch.ones(4, FEATURES)
    for experts, total, says in (
        (torch.zeros(4), 4, "experts: expected integers"),
        (torch.zeros(3, dtype=torch.long), 4, r"experts: expected integers \[4\]"),
        (torch.full((4,), 7), 4, "experts: expected 0 to 3, got 7 to 7"),
        (torch.zeros(4, dtype=torch.long), 5, "num_experts: 5 experts are not divisible by the 2 ranks"),
    ):
        with pytest.raises(ValueError, match=says):
            moe.dispatch(x, experts, total)
    with pytest.raises(ValueError, match="x: expected"):
        moe.dispatch(x[0], torch.zeros(4, dtype=torch.long), 4)
    tokens, route = moe.dispatch(x, torch.zeros(4, dtype=torch.long), 4)
    with pytest.raises(ValueError, match="outputs: expected"):
        moe.combine(tokens.new_ones(len(tokens) + 1, 2), route)
    with pytest.raises(ValueError, match="weights: expected"):
        moe.combine(tokens, route, torch.ones(3))


def test_wrong_arguments() -> None:
    run_ranks(refusals, 2)
