"""The passes of low-rank compression (PowerSGD, Vogels et al. 2019, arXiv:1905.13727) over one matrix.

The matrix that is compressed is gradient + residual; it is read once per pass and never stored. Its two factors are
fp32 with one row per rank of the approximation: ``left`` [rank, rows] and ``right`` [rank, columns]; their product is
``left.T @ right``. Every sum has one fixed order, so ranks with the same factors compute the same bits on any CPU.

A gradient is fp32, fp16 or bf16 and has shape [rows, columns] or is flat; a residual is fp32 with as many elements, or
None. Both are dense and on one device. The functions check their arguments and call the implementation for that
device: the C++ kernels or :class:`InNumpy` for CPU tensors; for CUDA tensors the kernels of `_cuda`, with the CPU's
bits, or :class:`InTorch`, as :func:`dtcomm.kernels.dispatch.low_rank_backend` says. Projections of CUDA tensors are
matrix products of torch either way. `dtcomm.compress.powersgd` calls this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch

from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import calls, counter_rng, cpu, dispatch
from dtcomm.kernels.dispatch import CUDA, REFERENCE, TORCH, current, low_rank_backend
from dtcomm.kernels.reference.floats import INFINITY, Floats, get, magnitude, put

MAX_RANK = 64  # kMaxRank in csrc/cpu/kernels.h
ROUNDING = 2.0**-18  # what is left of a vector is rounding if it is shorter than this part of it
SMALLEST = 2.0**-126  # a vector counts as zero if its largest element is below this
CHUNK = 1 << 22  # elements of a product that are computed at a time
_LANES = 16  # partial sums of a dot product


class Passes(Protocol):
    """An implementation for CPU tensors, whose arguments are checked: `cpu` or :class:`InNumpy`."""

    def project_rows(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
    ) -> None:
        """See :func:`project_rows`."""

    def project_columns(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
    ) -> None:
        """See :func:`project_columns`."""

    def expand(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
    ) -> None:
        """See :func:`expand`, of finite factors."""

    def orthonormalize(self, vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
        """See :func:`orthonormalize_all`. No tensor is empty."""


class DevicePasses(Protocol):
    """An implementation for CUDA tensors, but for projections, which are :class:`InTorch`'s: itself or `cuda`."""

    def expand(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        left: torch.Tensor,
        right: torch.Tensor,
        finite: torch.Tensor | None,
    ) -> None:
        """See :func:`expand`."""

    def orthonormalize(self, vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
        """See :func:`orthonormalize_all`. No tensor is empty."""

    def factors_finite(self, lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> torch.Tensor:
        """See :func:`factors_finite`: one bool tensor with an element per matrix."""


def project_rows(
    gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
) -> None:
    """``left[k, i] <- sum over j of matrix[i, j] * right[k, j]``.

    Raises TypeError or ValueError, which name the argument.
    """
    _check(gradient, residual, left, right)
    _projections(gradient).project_rows(gradient, residual, right, left)


def project_columns(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    """``right[k, j] <- sum over i of matrix[i, j] * left[k, i]``.

    Raises TypeError or ValueError, which name the argument.
    """
    _check(gradient, residual, left, right)
    _projections(gradient).project_columns(gradient, residual, left, right)


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
        _device_passes().expand(gradient, residual, left, right, finite)
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
    return _device_passes().factors_finite(lefts, rights).unbind()


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
        passes = _host_passes() if tensors[0].is_cpu else _device_passes()
        passes.orthonormalize(tensors, words)


def _projections(gradient: torch.Tensor) -> Passes | type[InTorch]:
    return _host_passes() if gradient.is_cpu else InTorch


def _host_passes() -> Passes:
    return InNumpy() if current() == REFERENCE else cpu


def _pair_finite(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(left).all() & torch.isfinite(right).all()
    if not finite:
        left.zero_()
        right.zero_()
    return finite


def _device_passes() -> DevicePasses:
    return InTorch() if low_rank_backend() == TORCH else cast(DevicePasses, dispatch.load_backend(CUDA))


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


class InTorch:
    """The passes on CUDA tensors as operators of torch, for which the host never waits.

    Projections are matrix products, whose order of sums is that of the device's library: ranks average the results.
    The other passes are used if there are no CUDA kernels (`dispatch.low_rank_backend`). `expand` sums element by
    element in the order of the CPU kernels and gives their bits. Only the orthonormal factors, which every rank
    computes by itself, rest on sums of torch; these are the same on devices of the same model.
    """

    @staticmethod
    def project_rows(
        gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
    ) -> None:
        """``left[k, i] <- sum over j of matrix[i, j] * right[k, j]``."""
        first, second = _terms(gradient, residual, left.shape[1])
        torch.mm(right, first.t(), out=left)
        if second is not None:
            left.addmm_(right, second.t())

    @staticmethod
    def project_columns(
        gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
    ) -> None:
        """``right[k, j] <- sum over i of matrix[i, j] * left[k, i]``."""
        first, second = _terms(gradient, residual, left.shape[1])
        torch.mm(left, first, out=right)
        if second is not None:
            right.addmm_(left, second)

    @staticmethod
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

    @staticmethod
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

    @staticmethod
    def orthonormalize(vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
        """Modified Gram-Schmidt on the rows of each tensor; replacements are drawn with the tensor's key."""
        for tensor, key in zip(vectors, keys, strict=True):
            _orthonormalize(tensor, key)


def _orthonormalize(vectors: torch.Tensor, key: int) -> None:
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
    numbers: torch.Tensor = (counter_rng.mix32(index + first & 0xFFFFFFFF) >> 8).float() * 2.0**-24 - 0.5
    return numbers.view(vectors.shape)


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
