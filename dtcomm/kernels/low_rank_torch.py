"""The passes of `low_rank` on CUDA tensors, as operators of torch, for which the host never waits.

Projections are matrix products, whose order of sums is that of the device's library: ranks average the results. The
other passes are used if there are no CUDA kernels (`dispatch.low_rank_backend`). `expand` sums element by element in
the order of the CPU kernels and gives their bits. Only the orthonormal factors, which every rank computes by itself,
rest on sums of torch; these are the same on devices of the same model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.kernels import counter_rng, local_tasks_torch

ROUNDING = 2.0**-18  # what is left of a vector is rounding if it is shorter than this part of it
SMALLEST = 2.0**-126  # a vector counts as zero if its largest element is below this
CHUNK = 1 << 22  # elements of a product that are computed at a time


def project_rows(
    gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
) -> None:
    """``left[k, i] <- sum over j of matrix[i, j] * right[k, j]``."""
    first, second = _terms(gradient, residual, left.shape[1])
    torch.mm(right, first.t(), out=left)
    if second is not None:
        left.addmm_(right, second.t())


def project_columns(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    """``right[k, j] <- sum over i of matrix[i, j] * left[k, i]``."""
    first, second = _terms(gradient, residual, left.shape[1])
    torch.mm(left, first, out=right)
    if second is not None:
        right.addmm_(left, second)


def factors_finite(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether the factors of each matrix are finite; factors that are not become zeros."""
    results = [
        torch.isfinite(left).all() & torch.isfinite(right).all()
        for left, right in zip(lefts, rights, strict=True)
    ]
    for left, right, finite in zip(lefts, rights, results, strict=True):
        left.masked_fill_(~finite, 0.0)
        right.masked_fill_(~finite, 0.0)
    return torch.stack(results)


def expand(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    finite: torch.Tensor | None = None,
) -> None:
    """gradient <- the product of the factors; residual <- gradient + residual - product.

    If ``finite`` (a 0-d bool) is False the gradient becomes NaN and the residual stays.
    """
    rows, columns = left.shape[1], right.shape[1]
    matrix = gradient.view(rows, columns)
    error = None if residual is None else residual.view(rows, columns)
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = matrix[start : start + step]
        factor = left[:, start : start + step, None]
        product = factor[0] * right[0]
        for k in range(1, left.shape[0]):
            product.add_(factor[k] * right[k])
        if error is not None:
            old = error[start : start + step]
            new = part + old - product
            old.copy_(new if finite is None else torch.where(finite, new, old))
        part.copy_(product if finite is None else torch.where(finite, product, float("nan")))


def orthonormalise(vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
    """Modified Gram-Schmidt on the rows of each tensor; replacements are drawn with the tensor's key."""
    for tensor, key in zip(vectors, keys, strict=True):
        _orthonormalise(tensor, key)


def _orthonormalise(vectors: torch.Tensor, key: int) -> None:
    """Gram-Schmidt on one tensor.

    Every operator costs the host some microseconds, so what the rows have in common is done for all at once.
    """
    count = len(vectors)
    replacements = _random_directions(vectors, key)
    largest = vectors.abs().amax(1, keepdim=True)
    inputs = torch.where(largest >= SMALLEST, vectors / largest, replacements)
    limits, replacement_limits = (
        torch.linalg.vector_norm(rows, dim=1) * ROUNDING for rows in (inputs, replacements)
    )
    results = torch.empty_like(vectors)
    for k in range(count):
        x = _orthogonal_part(results[:k], inputs[k])
        independent = torch.linalg.vector_norm(x) > limits[k]
        x = _orthogonal_part(results[:k], torch.where(independent, x, replacements[k]))
        length = torch.linalg.vector_norm(x)
        results[k].copy_(torch.where(independent | (length > replacement_limits[k]), x / length, 0.0))
    vectors.copy_(torch.where(torch.isfinite(largest), results, vectors))


def _terms(
    gradient: torch.Tensor, residual: torch.Tensor | None, rows: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 matrices whose sum is compressed; fp32 gradients and residuals are used as they are, without a copy."""
    if gradient.dtype == torch.float32 or residual is None:
        return gradient.float().view(rows, -1), None if residual is None else residual.view(rows, -1)
    return (residual + gradient.view(-1)).view(rows, -1), None


def _orthogonal_part(previous: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` without its components along the rows of `previous`."""
    if not len(previous):
        return x
    components = (previous * x).sum(1, keepdim=True)
    return x - (components * previous).sum(0)


def _random_directions(vectors: torch.Tensor, key: int) -> torch.Tensor:
    """Random numbers between -0.5 and 0.5 in the shape of `vectors`."""
    first = counter_rng.mix32(key & 0xFFFFFFFF)
    index = torch.arange(vectors.numel(), device=vectors.device)
    numbers = (local_tasks_torch.mix32(index + first & 0xFFFFFFFF) >> 8).float() * 2.0**-24 - 0.5
    return numbers.view(vectors.shape)
