"""Expert parallelism compared to the same experts on one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtcomm import moe
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

TOKENS, FEATURES, EXPERTS = 13, 32, 12
ROUNDED = "exact:rounded=true"


def make_case(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
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
    expert_outputs = torch.stack(
        [torch.tanh(x @ matrix) for matrix in matrices]
    )  # [experts, tokens, features]
    token_indices = torch.arange(len(x))[:, None]
    return (expert_outputs[experts, token_indices] * weights[:, :, None]).sum(1)


def compare_to_reference(
    actual: torch.Tensor, inputs: list[torch.Tensor], case: tuple[Any, ...], tolerance: float
) -> list[torch.Tensor]:
    """Compare outputs and the gradients of the inputs to the dense mixture; return the gradients of its experts."""
    x, experts, weights, matrices = case
    dense_inputs = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    dense_matrices = [matrix.clone().requires_grad_() for matrix in matrices]
    expected = dense(dense_inputs[0], experts, dense_inputs[1], dense_matrices)
    close(actual, expected, tolerance)
    scale = torch.linspace(-1, 1, actual.numel()).view_as(actual)
    (actual * scale).sum().backward()
    (expected * scale).sum().backward()
    for local_input, reference in zip(inputs, dense_inputs):
        close(local_input.grad, reference.grad, tolerance)
    # An expert's gradient comes from all ranks' tokens.
    totals = [torch.zeros_like(m) if m.grad is None else m.grad.clone() for m in dense_matrices]
    for total in totals:
        dist.all_reduce(total)
    return totals


def compare_to_dense(rank: int, ranks: int, codec: str, tolerance: float) -> None:
    x, experts, weights, matrices = make_case(rank)
    local_count = EXPERTS // ranks
    local = [
        matrix.clone().requires_grad_() for matrix in matrices[rank * local_count : (rank + 1) * local_count]
    ]
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    tokens, route = moe.dispatch(inputs[0], experts, EXPERTS, codec=codec, backward_codec=codec)
    assert sum(route.counts) == len(tokens)
    outputs = [torch.tanh(rows @ matrix) for rows, matrix in zip(route.split(tokens), local, strict=True)]
    actual = moe.combine(torch.cat(outputs), route, inputs[1])
    totals = compare_to_reference(actual, inputs, (x, experts, weights, matrices), tolerance)
    for number, matrix in enumerate(local):
        gradient = torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
        close(gradient, totals[rank * local_count + number], tolerance)


def compare_padded_to_dense(rank: int, ranks: int, codec: str, tolerance: float) -> None:
    x, experts, weights, matrices = make_case(rank)
    local_count = EXPERTS // ranks
    local = torch.stack(matrices[rank * local_count : (rank + 1) * local_count]).requires_grad_()
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    capacity = 2 * (TOKENS + 5 * (ranks - 1))  # a token may choose an expert twice
    rows, route = moe.dispatch_padded(
        inputs[0], experts, EXPERTS, capacity, codec=codec, backward_codec=codec
    )
    assert rows.shape == (local_count, ranks * capacity, FEATURES) and int(route.dropped) == 0
    assert not rows[~route.mask].any() and int(route.mask.sum()) == int(route.counts.sum())
    # The rows in use are those of `dispatch`, in the same order.
    tokens, exact_route = moe.dispatch(x, experts, EXPERTS, codec="none")
    assert route.counts.sum(1).tolist() == list(exact_route.counts)
    close(rows.detach()[route.mask], tokens, tolerance)
    actual = moe.combine_padded(torch.tanh(torch.bmm(rows, local)), route, inputs[1])
    totals = compare_to_reference(actual, inputs, (x, experts, weights, matrices), tolerance)
    for number in range(local_count):
        close(local.grad[number], totals[rank * local_count + number], tolerance)


@pytest.mark.parametrize(("ranks", "codec"), [(1, "none"), (2, "int8"), (3, "none"), (4, "none")])
def test_padded_equals_the_dense_mixture(ranks: int, codec: str) -> None:
    run_ranks(compare_padded_to_dense, ranks, codec, 1e-5 if codec == "none" else 0.06)


@on_ranks(2)
def test_rows_beyond_the_capacity_are_dropped(rank: int, ranks: int) -> None:
    """Of four rows for one expert two are dropped; a rank without tokens takes part."""
    x = torch.arange(1.0, 5.0)[:, None].repeat(1, FEATURES) if rank else torch.ones(0, FEATURES)
    rows, route = moe.dispatch_padded(x, torch.full((len(x),), 3), 4, 2, codec="none")
    assert int(route.dropped) == (2 if rank else 0)
    assert route.counts.tolist() == ([[0, 0], [0, 0]] if rank == 0 else [[0, 0], [0, 2]])
    # What experts write to rows that are not in use does not matter.
    outputs = torch.where(route.mask[:, :, None], rows * 2, torch.nan)
    y = moe.combine_padded(outputs, route, torch.full((len(x),), 0.5))
    assert torch.equal(y, x * (x <= 2))
    for arguments, message in (
        ((x, torch.full((len(x),), 3), 4, 0), "capacity: expected a positive number of rows, got 0"),
        ((x, torch.full((len(x),), 3), 5, 2), "num_experts: 5 experts are not divisible"),
        ((x, torch.zeros(7, dtype=torch.long), 4, 2), "experts: expected integers"),
        ((x, torch.zeros(len(x), 5, dtype=torch.long), 4, 2), "experts: expected 1 to 4 choices"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.dispatch_padded(*arguments)
    with pytest.raises(ValueError, match="experts: expected 0 to 3, got 9 to 9"):
        moe.dispatch_padded(torch.ones(2, 8), torch.full((2,), 9), 4, 2)
    with pytest.raises(ValueError, match=r"outputs: expected \[2, 4, features\]"):
        moe.combine_padded(rows[:, :3], route)
    with pytest.raises(ValueError, match="weights: expected"):
        moe.combine_padded(rows, route, torch.ones(9))


def close(actual: Any, expected: Any, tolerance: float) -> None:
    error = float(torch.linalg.vector_norm(actual - expected))
    size = float(torch.linalg.vector_norm(expected))
    assert error <= tolerance * max(size, 1e-6), (error, size)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_uncompressed_equals_the_dense_mixture(ranks: int) -> None:
    run_ranks(compare_to_dense, ranks, "none", 1e-5)


@pytest.mark.parametrize("codec", ["int8", "fp16", "bf16"])
def test_compressed_is_close_to_the_dense_mixture(codec: str) -> None:
    run_ranks(compare_to_dense, 2, codec, 0.06)


@on_ranks(2)
def test_a_rank_without_tokens_and_an_expert_with_all_tokens(rank: int, ranks: int) -> None:
    """One rank has no tokens, and all tokens go to one expert."""
    x = torch.ones(0 if rank == 0 else 4, FEATURES)
    tokens, route = moe.dispatch(x, torch.full((len(x),), 3), 4, codec="none")
    assert route.counts == ((0, 0) if rank == 0 else (0, 4))
    y = moe.combine(tokens * 2, route)
    assert torch.equal(y, x * 2)


@on_ranks(2)
def test_invalid_arguments_are_refused(rank: int, ranks: int) -> None:
    x = torch.ones(4, FEATURES)
    for experts, total, message in (
        (torch.zeros(4), 4, "experts: expected integers"),
        (torch.zeros(3, dtype=torch.long), 4, r"experts: expected integers \[4\]"),
        (torch.full((4,), 7), 4, "experts: expected 0 to 3, got 7 to 7"),
        (torch.zeros(4, dtype=torch.long), 5, "num_experts: 5 experts are not divisible by the 2 ranks"),
        (torch.zeros(4, 5, dtype=torch.long), 4, "experts: expected 1 to 4 choices a token"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.dispatch(x, experts, total)
    chosen = torch.zeros(4, dtype=torch.long)
    for options, message in (
        ({"capacity": 0}, "capacity: expected a positive number of rows, got 0"),
        ({"capacity": 2.5}, "capacity: expected a positive number of rows, got 2.5"),
        ({"priorities": torch.ones(3)}, r"priorities: expected \[4, 1\]"),
        ({"codec": "sign"}, "codec: sign loses 60% of the tokens"),
        ({"combine_codec": "int2"}, "combine_codec: int2 loses .* of the experts' outputs"),
        ({"backward_codec": "topk:ratio=0.01"}, "backward_codec: topk.* loses .* of the gradients"),
        ({"codec": "fp9"}, "codec: unknown codec 'fp9'"),
        ({"codec": "none/fp8_e4m3"}, "codec: .* names a codec for each level"),
        ({"codec": "lossless"}, "codec: lossless has payloads of a length that depends on the data"),
        ({"codec": "exact"}, "codec: exact is for sums"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.dispatch(x, chosen, 4, **options)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="x: expected fp32, fp16 or bf16, got"):
        moe.dispatch(x.double(), chosen, 4)
    assert len(moe.dispatch(x, chosen, 4, codec="sign", allow_inaccurate=True)[0]) == (8 if rank == 0 else 0)
    with pytest.raises(ValueError, match="x: expected"):
        moe.dispatch(x[0], torch.zeros(4, dtype=torch.long), 4)
    tokens, route = moe.dispatch(x, torch.zeros(4, dtype=torch.long), 4)
    with pytest.raises(ValueError, match="outputs: expected"):
        moe.combine(tokens.new_ones(len(tokens) + 1, 2), route)
    with pytest.raises(ValueError, match="weights: expected"):
        moe.combine(tokens, route, torch.ones(3))


def combined_rows(rank: int, ranks: int) -> torch.Tensor:
    """Return the rounded sums and gradients of the tokens of this rank: of all 24 those that it has."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 40, generator=generator) * torch.exp(9 * torch.randn(24, 40, generator=generator))
    experts = torch.randint(0, 4, (24, 3), generator=generator)
    weights = torch.rand(24, 3, generator=generator)
    own = slice(rank * 24 // ranks, (rank + 1) * 24 // ranks)
    rows, route = moe.dispatch_padded(x[own], experts[own], 4, 24, codec="none", combine_codec=ROUNDED)
    scales = torch.linspace(-2, 3, 4)[rank * 4 // ranks : (rank + 1) * 4 // ranks, None, None]
    outputs = (rows * scales).requires_grad_()
    y = moe.combine_padded(outputs, route, weights[own])
    terms = x[own, None] * torch.linspace(-2, 3, 4)[experts[own], None] * weights[own, :, None]
    for row, token in zip(y.tolist(), terms.double().transpose(1, 2).tolist(), strict=True):
        # The sum of three fp32 numbers of doubles, rounded twice, is the right one but for ties, which are not here.
        assert row == torch.tensor([math.fsum(column) for column in token]).tolist()
    y.sum().backward()
    assert outputs.grad is not None and outputs.grad.abs().sum() > 0
    return y.detach()


def test_rounded_sums_of_experts_do_not_depend_on_the_ranks() -> None:
    """Check that each token's sum is the exact one, rounded once, and that the other form refuses the codec."""
    one, two, four = (torch.cat(run_ranks(combined_rows, ranks)) for ranks in (1, 2, 4))
    assert torch.equal(one, two) and torch.equal(one, four)


@on_ranks(1)
def test_rounded_sums_need_the_padded_form(rank: int, n: int) -> None:
    x, experts = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="combine_codec: exact:rounded=true rounds once"):
        moe.dispatch(x, experts, 4, combine_codec=ROUNDED)
    with pytest.raises(ValueError, match="codec: exact:rounded=true is for sums"):
        moe.dispatch_padded(x, experts, 4, 4, codec=ROUNDED)
