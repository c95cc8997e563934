"""The torch implementation of the low-rank passes, on CPU tensors, compared with the CPU kernels."""

from __future__ import annotations

import pytest
import torch

from dtcomm.kernels import low_rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (64, 33, 1), (33, 700, 4), (300, 20, 9)])
@pytest.mark.parametrize("feedback", [False, True])
def test_passes_equal_the_native_ones(
    rows: int, columns: int, rank: int, dtype: torch.dtype, feedback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "CHUNK", 1000)  # several pieces
    dice = torch.Generator().manual_seed(rows)
    gradient = torch.randn(rows * columns, generator=dice).to(dtype)
    residual = torch.randn(rows * columns, generator=dice) if feedback else None
    left, right = torch.randn(rank, rows, generator=dice), torch.randn(rank, columns, generator=dice)
    for project, factor, out in (("project_rows", right, left), ("project_columns", left, right)):
        result = torch.empty_like(out)
        getattr(low_rank, project)(gradient, residual, factor, out)
        getattr(low_rank.InTorch, project)(gradient, residual, factor, result)
        torch.testing.assert_close(result, out, rtol=1e-4, atol=1e-3)
    expansions = [(gradient.clone(), None if residual is None else residual.clone()) for _ in range(3)]
    low_rank.expand(*expansions[0], left, right)
    low_rank.InTorch.expand(*expansions[1], left, right, torch.tensor(True))
    low_rank.InTorch.expand(*expansions[2], left, right, torch.tensor(False))
    assert torch.equal(expansions[0][0], expansions[1][0]) and bool(expansions[2][0].isnan().all())
    if residual is not None:
        assert torch.equal(expansions[0][1], expansions[1][1]) and torch.equal(expansions[2][1], residual)  # type: ignore[arg-type]


def test_factors_with_nan_or_inf_become_zeros() -> None:
    lefts, rights = [torch.ones(2, 3) for _ in range(3)], [torch.ones(2, 5) for _ in range(3)]
    lefts[0][1, 1], rights[2][0, 4] = torch.nan, torch.inf
    assert low_rank.InTorch.factors_finite(lefts, rights).tolist() == [False, True, False]
    for at, factor in enumerate([*lefts, *rights]):
        assert bool((factor == (at % 3 == 1)).all())


def orthonormal(vectors: torch.Tensor) -> None:
    torch.testing.assert_close(vectors @ vectors.t(), torch.eye(len(vectors)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rows_become_orthonormal_and_keep_their_span(scale: float) -> None:
    original = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)) * scale
    result = original.clone()
    low_rank.InTorch.orthonormalize([result], [3])
    orthonormal(result)
    unit = original / original.abs().amax()
    torch.testing.assert_close(unit @ result.t() @ result, unit, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result[0], unit[0] / unit[0].norm(), rtol=1e-5, atol=1e-6)


def test_linearly_dependent_rows_are_replaced() -> None:
    original = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    original[1], original[2], original[4] = 0.0, original[0], 3 * original[3] - original[0]
    result = original.clone()
    low_rank.InTorch.orthonormalize([result], [7])
    orthonormal(result)
    zeros = [torch.zeros(8, 8), torch.zeros(8, 8)]  # all directions that there are
    for key, vectors in enumerate(zeros):
        low_rank.InTorch.orthonormalize([vectors], [key])
        orthonormal(vectors)
    assert not torch.equal(*zeros)


def test_rows_with_nan_or_inf_stay() -> None:
    original = torch.randn(3, 10)
    original[1, 2], original[2, 0] = torch.nan, torch.inf
    result = original.clone()
    low_rank.InTorch.orthonormalize([result], [0])
    assert torch.allclose(result[1:], original[1:], rtol=0, atol=0, equal_nan=True)
    assert bool(torch.isfinite(result[0]).all())
