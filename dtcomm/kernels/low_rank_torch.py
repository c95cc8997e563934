"""The passes of low-rank compression on tensors of a device, as torch's own operators, which nobody waits for.

Projections are matrix products, in the order that the device's library takes: ranks average them. The other passes
serve where there are no kernels of CUDA (`dispatch.low_rank_backend`). The product of the factors is added up element
by element in the order of the CPU's kernels, with its bits. Only the orthonormal factors, which every rank makes for
itself, rest on sums of torch's that are the same on devices of the same model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.kernels import counter_rng, local_tasks_torch

LOST = 2.0**-18  # of a vector's length, when what is left of it is rounding
LEAST = 2.0**-126  # of a vector's largest element, below which it counts as zero
CHUNK = 1 << 22  # elements of a product at a time


def project_rows(
    gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
) -> None:
    """``left[k, i] = sum over j of matrix[i, j] * right[k, j]``."""
    first, second = _terms(gradient, residual, left.shape[1])
    torch.mm(right, first.t(), out=left)
    if second is not None:
        left.addmm_(right, second.t())


def project_columns(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    """``right[k, j] = sum over i of matrix[i, j] * left[k, i]``."""
    first, second = _terms(gradient, residual, left.shape[1])
    torch.mm(left, first, out=right)
    if second is not None:
        right.addmm_(left, second)


def factors_finite(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether the factors of each matrix are finite; those that are not become zeros."""
    found = [
        torch.isfinite(left).all() & torch.isfinite(right).all()
        for left, right in zip(lefts, rights, strict=True)
    ]
    for left, right, finite in zip(lefts, rights, found, strict=True):
        lost = ~finite
        left.masked_fill_(lost, 0.0)
        right.masked_fill_(lost, 0.0)
    return torch.stack(found)


def expand(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    finite: torch.Tensor | None = None,
) -> None:
    """The gradient becomes the product of the factors, and the residual what gradient + residual had more.

    Where ``finite`` (a bool without dimensions) says no, the gradient becomes NaN and the residual stays.
    """
    rows, columns = left.shape[1], right.shape[1]
    matrix = gradient.view(rows, columns)
    lost = None if residual is None else residual.view(rows, columns)
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = matrix[start : start + step]
        these = left[:, start : start + step, None]
        product = these[0] * right[0]
        for k in range(1, left.shape[0]):
            product.add_(these[k] * right[k])
        if lost is not None:
            old = lost[start : start + step]
            new = part + old - product
            old.copy_(new if finite is None else torch.where(finite, new, old))
        part.copy_(product if finite is None else torch.where(finite, product, float("nan")))


def orthonormalise(vectors: torch.Tensor, key: int) -> None:
    """Gram-Schmidt, in order, twice over; what a row is replaced by comes from its number and ``key``.

    Every operator takes the host some microseconds, so what all rows have in common is done to all at once.
    """
    count = len(vectors)
    spare = _spare(vectors, key)
    tops = vectors.abs().amax(1, keepdim=True)
    given = torch.where(tops >= LEAST, vectors / tops, spare)
    lengths, spares = (torch.linalg.vector_norm(each, dim=1) * LOST for each in (given, spare))
    found = torch.empty_like(vectors)
    for k in range(count):
        x = _apart(found[:k], given[k])
        there = torch.linalg.vector_norm(x) > lengths[k]
        x = _apart(found[:k], torch.where(there, x, spare[k]))
        left = torch.linalg.vector_norm(x)
        found[k].copy_(torch.where(there | (left > spares[k]), x / left, 0.0))
    vectors.copy_(torch.where(torch.isfinite(tops), found, vectors))


def _terms(
    gradient: torch.Tensor, residual: torch.Tensor | None, rows: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrices of fp32 that add up to what is compressed, of which none is made where both are there."""
    if gradient.dtype == torch.float32 or residual is None:
        return gradient.float().view(rows, -1), None if residual is None else residual.view(rows, -1)
    return (residual + gradient.view(-1)).view(rows, -1), None


def _apart(before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Without what lies along the rows of ``before``."""
    if not len(before):
        return x
    along = (before * x).sum(1, keepdim=True)
    return x - (along * before).sum(0)


def _spare(vectors: torch.Tensor, key: int) -> torch.Tensor:
    """Random numbers between -0.5 and 0.5, as many."""
    first = counter_rng.mix32(key & 0xFFFFFFFF)
    at = torch.arange(vectors.numel(), device=vectors.device)
    found = (local_tasks_torch.mix32(at + first & 0xFFFFFFFF) >> 8).float() * 2.0**-24 - 0.5
    return found.view(vectors.shape)
