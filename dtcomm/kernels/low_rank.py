"""The passes of low-rank compression (PowerSGD, Vogels et al. 2019, arXiv:1905.13727) over one matrix.

The matrix that is compressed is gradient + residual; it is read once per pass and never stored. Its two factors are
fp32 with one row per rank of the approximation: ``left`` [rank, rows] and ``right`` [rank, columns]; their product is
``left.T @ right``. Every sum has one fixed order, so ranks with the same factors compute the same bits on any CPU.

A gradient is fp32, fp16 or bf16 and has shape [rows, columns] or is flat; a residual is fp32 with as many elements, or
None. Both are dense and on one device. The functions check their arguments and call the implementation for that
device: the C++ kernels or :class:`InNumpy` for CPU tensors; for CUDA tensors the kernels of `_cuda`, with the CPU's
bits. Projections of CUDA tensors are matrix products of torch, whose order of sums is that of the device's library:
ranks average the results. `dtcomm.compress.powersgd` calls this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import calls, counter_rng, cpu, dispatch
from dtcomm.kernels.reference.floats import INFINITY, Floats, get, magnitude, put

MAX_RANK = 64  # kMaxRank in csrc/cpu/kernels.h
ROUNDING = 2.0**-18  # what is left of a vector is rounding if it is shorter than this part of it
SMALLEST = 2.0**-126  # a vector counts as zero if its largest element is below this
_LANES = 16  # partial sums of a dot product


def project_rows(
    gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
) -> None:
    """``left[k, i] <- sum over j of matrix[i, j] * right[k, j]``.

    Raises TypeError or ValueError, which name the argument.
    """
    _check(gradient, residual, left, right)
    if gradient.is_cpu:
        _host_passes().project_rows(gradient, residual, right, left)
    else:
        _multiply(right, [term.t() for term in _terms(gradient, residual, left.shape[1])], left)


def project_columns(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    """``right[k, j] <- sum over i of matrix[i, j] * left[k, i]``.

    Raises TypeError or ValueError, which name the argument.
    """
    _check(gradient, residual, left, right)
    if gradient.is_cpu:
        _host_passes().project_columns(gradient, residual, left, right)
    else:
        _multiply(left, _terms(gradient, residual, left.shape[1]), right)


def expand(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    finite: torch.Tensor | None = None,
) -> None:
    """gradient <- the product of the factors; residual <- gradient + residual - product.

    ``finite`` is a 0-d bool on the gradient's device, from :func:`factors_finite`: if it is False the gradient becomes
    NaN and the residual stays. The host does not wait for a CUDA device. Raises TypeError or ValueError, which name the
    argument.
    """
    _check(gradient, residual, left, right)
    if not gradient.is_cpu:
        dispatch.cuda_kernels().expand(gradient, residual, left, right, finite)
    elif finite is None or finite:
        _host_passes().expand(gradient, residual, left, right)
    else:
        gradient.fill_(float("nan"))


def factors_finite(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """For each matrix a 0-d bool on its device: whether both factors are finite. Factors that are not become zeros.

    :func:`expand` takes the answer, so that the host need not wait for a CUDA device. The tensors are on one device.
    Raises TypeError or ValueError, which name the argument.
    """
    if len(lefts) != len(rights):
        raise ValueError(f"rights: expected {len(lefts)}, as many as lefts, got {len(rights)}")
    if not lefts:
        return []
    if lefts[0].is_cpu:
        return [_pair_finite(left, right) for left, right in zip(lefts, rights, strict=True)]
    for name, factors in (("lefts", lefts), ("rights", rights)):
        for factor in factors:
            calls.floats(name, factor, factor.numel(), torch.float32, like=lefts[0])
    results: torch.Tensor = dispatch.cuda_kernels().factors_finite(lefts, rights)
    return results.unbind()


def orthonormalize(vectors: torch.Tensor, key: int = 0) -> None:
    """Make the rows of ``vectors`` (fp32 [count, n]) orthonormal, in order, by modified Gram-Schmidt run twice.

    A row that depends on the rows before it (a zero row, say) is replaced by a random one drawn with ``key``, or by
    zeros if there is no further direction. Rows with NaN or Inf stay. Raises TypeError or ValueError, which name the
    argument.
    """
    orthonormalize_all([vectors], [key])


def orthonormalize_all(vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
    """:func:`orthonormalize` for several tensors on one device, with a key each; on CUDA devices in one launch."""
    if len(vectors) != len(keys):
        raise ValueError(f"keys: expected {len(vectors)}, as many as vectors, got {len(keys)}")
    for tensor in vectors:
        calls.floats("vectors", tensor, tensor.numel(), torch.float32, like=vectors[0])
        if tensor.ndim != 2:
            raise ValueError(f"vectors: expected 2 dimensions, got {tensor.ndim}")
    checked = [(tensor, calls.uint64("key", key)) for tensor, key in zip(vectors, keys) if tensor.numel()]
    if checked:
        tensors, words = zip(*checked)
        passes = _host_passes() if tensors[0].is_cpu else dispatch.cuda_kernels()
        passes.orthonormalize(tensors, words)


def _host_passes() -> ModuleType | type[InNumpy]:
    return InNumpy if dispatch.current() == dispatch.REFERENCE else cpu


def _pair_finite(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(left).all() & torch.isfinite(right).all()
    if not finite:
        left.zero_()
        right.zero_()
    return finite


def _check(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    for name, factor in (("left", left), ("right", right)):
        calls.tensor(name, factor, gradient)
        if factor.ndim != 2 or factor.dtype != torch.float32:
            raise ValueError(f"{name}: expected fp32 [rank, n], got {factor.dtype} {tuple(factor.shape)}")
    (rank, rows), (other, columns) = left.shape, right.shape
    if rank != other or not 1 <= rank <= MAX_RANK:
        raise ValueError(f"right: expected 1 to {MAX_RANK} rows and as many as left's {rank}, got {other}")
    calls.floats("gradient", gradient, rows * columns, *FLOAT_TYPES)
    if residual is not None:
        calls.floats("residual", residual, rows * columns, torch.float32)


def _terms(gradient: torch.Tensor, residual: torch.Tensor | None, rows: int) -> list[torch.Tensor]:
    """fp32 matrices whose sum is compressed; fp32 gradients and residuals are used as they are, without a copy."""
    if residual is None:
        return [gradient.float().view(rows, -1)]
    if gradient.dtype == torch.float32:
        return [gradient.view(rows, -1), residual.view(rows, -1)]
    return [(residual + gradient.view(-1)).view(rows, -1)]


def _multiply(factor: torch.Tensor, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out`` <- the product of ``factor`` and the sum of the terms."""
    torch.mm(factor, terms[0], out=out)
    for term in terms[1:]:
        out.addmm_(factor, term)


class InNumpy:
    """The reference on CPU tensors, in numpy: every product and sum is rounded to fp32, in a stated order."""

    @staticmethod
    def project_rows(
        gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
    ) -> None:
        """left[k, i] <- _dot(matrix[i], right[k])."""
        matrix = _matrix(gradient, residual, left.shape[1])
        for k, vector in enumerate(right.numpy()):
            left.numpy()[k] = _dot(matrix, vector)

    @staticmethod
    def project_columns(
        gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
    ) -> None:
        """right[k] <- the rows of the matrix, each times its left[k, i], added in order to zero."""
        matrix = _matrix(gradient, residual, left.shape[1])
        sums = right.numpy()
        sums[:] = 0
        for i, row in enumerate(matrix):
            sums += left.numpy()[:, i, None] * row

    @staticmethod
    def expand(
        gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
    ) -> None:
        """gradient <- the outer products of the factors, added in order; residual <- the error."""
        matrix = _matrix(gradient, residual, left.shape[1])
        product = left.numpy()[0][:, None] * right.numpy()[0]
        for p, q in zip(left.numpy()[1:], right.numpy()[1:], strict=True):
            product = product + p[:, None] * q
        if residual is not None:
            put(residual, (matrix - product).reshape(-1))
        put(gradient, product.reshape(-1))

    @staticmethod
    def orthonormalize(vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
        """Modified Gram-Schmidt on the rows of each tensor, in order, twice."""
        with np.errstate(all="ignore"):
            for tensor, key in zip(vectors, keys, strict=True):
                _orthonormalize_rows(tensor.numpy(), key)


def _orthonormalize_rows(rows: Floats, key: int) -> None:
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


def _dot(a: Floats, b: Floats) -> Floats:
    """The dot product over the last axis: element i is added to sum i mod 16; the 16 sums are folded in halves."""
    pad = [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % _LANES)]
    products = np.pad(a * b, pad).reshape((*a.shape[:-1], -1, _LANES))
    sums: Floats = np.zeros((*a.shape[:-1], _LANES), np.float32)
    for i in range(products.shape[-2]):
        sums += products[..., i, :]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    folded: Floats = sums[..., 0]
    return folded


def _direction(before: Floats, x: Floats) -> Floats | None:
    """`x` made orthogonal to the vectors `before` and of length 1; None if only rounding is left of it."""
    length = np.sqrt(_dot(x, x))
    for _ in range(2):
        for other in before:
            x = x + -_dot(x, other) * other
    left = np.sqrt(_dot(x, x))
    if not left > length * np.float32(ROUNDING):
        return None
    unit: Floats = np.divide(x, left, dtype=np.float32)
    return unit


def _matrix(gradient: torch.Tensor, residual: torch.Tensor | None, rows: int) -> Floats:
    matrix = get(gradient)
    if residual is not None:
        matrix = matrix + get(residual)
    return matrix.reshape(rows, -1)
