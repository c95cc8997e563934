"""The passes of `dtcomm.kernels.low_rank` in numpy: every product and sum is rounded to fp32, in a stated order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference.floats import INFINITY, Floats, get, magnitude, put

LANES = 16
ROUNDING = np.float32(2**-18)  # what is left of a vector is rounding if it is shorter than this part of it


def project_rows(
    gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
) -> None:
    """left[k, i] <- dot(matrix[i], right[k])."""
    matrix = _sum(gradient, residual, left.shape[1])
    for k, vector in enumerate(right.numpy()):
        left.numpy()[k] = dot(matrix, vector)


def project_columns(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    """right[k] <- the rows of the matrix, each times its left[k, i], added in order to zero."""
    matrix = _sum(gradient, residual, left.shape[1])
    sums = right.numpy()
    sums[:] = 0
    for i, row in enumerate(matrix):
        sums += left.numpy()[:, i, None] * row


def expand(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    finite: torch.Tensor | None = None,
) -> None:
    """gradient <- the outer products of the factors, added in order; residual <- the error. `finite` is None."""
    matrix = _sum(gradient, residual, left.shape[1])
    product = left.numpy()[0][:, None] * right.numpy()[0]
    for p, q in zip(left.numpy()[1:], right.numpy()[1:], strict=True):
        product = product + p[:, None] * q
    if residual is not None:
        put(residual, (matrix - product).reshape(-1))
    put(gradient, product.reshape(-1))


def orthonormalize(vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
    """Modified Gram-Schmidt on the rows of each tensor, in order, twice."""
    with np.errstate(all="ignore"):
        for tensor, key in zip(vectors, keys, strict=True):
            _orthonormalize(tensor.numpy(), key)


def _orthonormalize(rows: Floats, key: int) -> None:
    n = rows.shape[1]
    for k, row in enumerate(rows):
        top = magnitude(row).max()
        if top >= INFINITY:
            continue
        direction = None
        if top >= 0x00800000:
            power = np.uint32(top & 0x7F800000).view(np.float32)
            direction = _direction(rows[:k], row / power)
        for attempt in range(4):
            if direction is None:
                direction = _direction(
                    rows[:k], counter_rng.uniform(key, (k * 4 + attempt) * n, n) - np.float32(0.5)
                )
        rows[k] = 0 if direction is None else direction


def dot(a: Floats, b: Floats) -> Floats:
    """The dot product over the last axis: element i is added to sum i mod 16; the 16 sums are folded in halves."""
    pad = [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % LANES)]
    products = np.pad(a * b, pad).reshape((*a.shape[:-1], -1, LANES))
    sums: Floats = np.zeros((*a.shape[:-1], LANES), np.float32)
    for i in range(products.shape[-2]):
        sums += products[..., i, :]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    folded: Floats = sums[..., 0]
    return folded


def _direction(before: Floats, x: Floats) -> Floats | None:
    """`x` made orthogonal to the vectors `before` and of length 1; None if only rounding is left of it."""
    length = np.sqrt(dot(x, x))
    for _ in range(2):
        for other in before:
            x = x + -dot(x, other) * other
    left = np.sqrt(dot(x, x))
    if not left > length * ROUNDING:
        return None
    unit: Floats = np.divide(x, left, dtype=np.float32)
    return unit


def _sum(gradient: torch.Tensor, residual: torch.Tensor | None, rows: int) -> Floats:
    matrix = get(gradient)
    if residual is not None:
        matrix = matrix + get(residual)
    return matrix.reshape(rows, -1)
