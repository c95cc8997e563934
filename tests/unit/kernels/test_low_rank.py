"""Low-rank passes: every kernel gives the bits of the reference, and the numbers are right."""

from __future__ import annotations

import pytest
import torch

from dtcomm.kernels import available, low_rank, use

SHAPES = [(1, 1), (3, 5), (16, 16), (33, 17), (7, 2049), (130, 4100)]
FAST = [name for name in available() if name in ("generic", "avx2", "avx512", "avx512vbmi", "neon")]


def inputs(rows: int, columns: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * columns + rank)
    gradient = torch.randn(rows * columns, generator=generator).to(dtype)
    residual = torch.randn(rows * columns, generator=generator) * 0.1
    return (
        gradient,
        residual,
        torch.randn(rank, rows, generator=generator),
        torch.randn(rank, columns, generator=generator),
    )


def passes(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> list[torch.Tensor]:
    gradient = gradient.clone()
    residual = None if residual is None else residual.clone()
    p, q = torch.empty_like(left), torch.empty_like(right)
    low_rank.project_rows(gradient, residual, right, p)
    low_rank.project_columns(gradient, residual, left, q)
    basis = p.clone()
    low_rank.orthonormalize(basis, key=5)
    low_rank.expand(gradient, residual, left, right)
    return [p, q, basis, gradient] + ([] if residual is None else [residual])


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_every_kernel_gives_the_same_bits(rank: int, dtype: torch.dtype, with_residual: bool) -> None:
    for rows, columns in SHAPES:
        gradient, residual, left, right = inputs(rows, columns, rank, dtype)
        with use("reference"):
            expected = passes(gradient, residual if with_residual else None, left, right)
        for kernel in FAST:
            with use(kernel):
                results = passes(gradient, residual if with_residual else None, left, right)
            for name, a, b in zip(("left", "right", "basis", "gradient", "residual"), results, expected):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (kernel, rows, columns, name)


@pytest.mark.parametrize("kernel", available())
def test_the_passes_are_matrix_products(kernel: str) -> None:
    gradient, residual, left, right = inputs(70, 90, 4, torch.float32)
    matrix = (gradient + residual).view(70, 90)
    with use(kernel):
        p, q, basis, product, lost = passes(gradient, residual, left, right)
    torch.testing.assert_close(p, right @ matrix.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(q, left @ matrix, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(basis @ basis.T, torch.eye(4), rtol=0, atol=1e-6)
    torch.testing.assert_close(product.view(70, 90), left.T @ right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product + lost, matrix.reshape(-1), rtol=0, atol=1e-5)
    # The basis spans what p spanned.
    torch.testing.assert_close(p @ basis.T @ basis, p, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernel", available())
def test_linearly_dependent_rows_are_replaced(kernel: str) -> None:
    """Zero rows, equal rows, rows of 1e-30 and of 1e30 all become orthonormal."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(50, generator=generator)
    vectors = torch.stack([torch.zeros(50), row * 1e30, row, row * 1e-30, torch.zeros(50), row * 3])
    with use(kernel):
        low_rank.orthonormalize(vectors, key=1)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(6), rtol=0, atol=1e-6)
    torch.testing.assert_close(vectors[1], row / row.norm(), rtol=0, atol=0.5)


@pytest.mark.parametrize("kernel", available())
def test_vectors_beyond_the_dimension_become_zeros(kernel: str) -> None:
    vectors = torch.ones(4, 2)
    with use(kernel):
        low_rank.orthonormalize(vectors)
    torch.testing.assert_close(vectors[:2] @ vectors[:2].T, torch.eye(2), rtol=0, atol=1e-6)
    assert not vectors[2:].any()


@pytest.mark.parametrize("kernel", available())
def test_rows_with_inf_are_not_orthonormalized(kernel: str) -> None:
    vectors = torch.randn(3, 20)
    vectors[1, 4] = float("inf")
    with use(kernel):
        low_rank.orthonormalize(vectors)
    assert vectors[1, 4] == float("inf") and not torch.isfinite(vectors[1:]).all()


@pytest.mark.parametrize("kernel", available())
def test_orthonormalize_all_equals_single_calls(kernel: str) -> None:
    """Every tensor has its own key; one has no elements."""
    dice = torch.Generator().manual_seed(4)
    shapes = [(3, 40), (2, 0), (1, 7), (4, 3)]
    many = [torch.randn(shape, generator=dice) for shape in shapes]
    many[0][1] = 0.0
    alone = [tensor.clone() for tensor in many]
    with use(kernel):
        low_rank.orthonormalize_all(many, [9, 8, 7, 6])
        for tensor_alone, key in zip(alone, (9, 8, 7, 6)):
            low_rank.orthonormalize(tensor_alone, key)
    assert all(map(torch.equal, many, alone))


def test_factors_with_nan_or_inf_reach_the_gradient_and_no_residual() -> None:
    gradient, residual, left, right = inputs(6, 7, 2, torch.float32)
    before = residual.clone()
    whole, nan, inf = ((left.clone(), right.clone()) for _ in range(3))
    nan[0][0, 0], inf[1][1, 3] = float("nan"), float("inf")
    lefts, rights = zip(whole, nan, inf, strict=True)
    finite = low_rank.factors_finite(lefts, rights)
    assert [bool(answer) for answer in finite] == [True, False, False]
    assert torch.equal(whole[0], left) and torch.equal(whole[1], right)
    assert not any(factor.any() for factor in (*nan, *inf))
    low_rank.expand(poisoned := gradient.clone(), residual, *nan, finite[1])
    assert poisoned.isnan().all() and torch.equal(residual, before)
    low_rank.expand(expanded := gradient.clone(), with_finite := before.clone(), left, right, finite[0])
    low_rank.expand(gradient, residual, left, right)
    assert torch.equal(expanded, gradient) and torch.equal(with_finite, residual)
    assert low_rank.factors_finite([], []) == []


def test_wrong_arguments_are_refused() -> None:
    gradient, residual, left, right = inputs(6, 7, 2, torch.float32)
    with pytest.raises(ValueError, match="gradient: expected 42 elements, got 41"):
        low_rank.expand(gradient[:41], residual, left, right)
    with pytest.raises(TypeError, match="residual"):
        low_rank.expand(gradient, residual.double(), left, right)
    with pytest.raises(ValueError, match="right: expected 1 to 64 rows"):
        low_rank.project_rows(gradient, None, right[:1], left)
    with pytest.raises(ValueError, match="left: expected fp32"):
        low_rank.project_columns(gradient, None, left.double(), right)
    with pytest.raises(TypeError, match="gradient"):
        low_rank.expand(gradient.long(), None, left, right)
    with pytest.raises(ValueError, match="vectors: expected 2"):
        low_rank.orthonormalize(torch.ones(3))
    with pytest.raises(ValueError, match="rights: expected 1, as many as lefts, got 2"):
        low_rank.factors_finite([left], [right, right])
    with pytest.raises(ValueError, match="keys: expected 2, as many as vectors, got 1"):
        low_rank.orthonormalize_all([left, right], [1])
