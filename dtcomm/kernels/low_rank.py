"""The passes of low-rank compression (PowerSGD, Vogels et al. 2019, arXiv:1905.13727) over one matrix.

The matrix that is compressed is gradient + residual; it is read once per pass and never stored. Its two factors are
fp32 with one row per rank of the approximation: ``left`` [rank, rows] and ``right`` [rank, columns]; their product is
``left.T @ right``. Every sum has one fixed order, so ranks with the same factors compute the same bits on any CPU.

A gradient is fp32, fp16 or bf16 and has shape [rows, columns] or is flat; a residual is fp32 with as many elements, or
None. Both are dense and on one device. The functions check their arguments and call the implementation for that
device (:class:`Passes`): the C++ kernels or the reference for CPU tensors; for CUDA tensors the kernels of `_cuda`,
with the CPU's bits, or operators of torch, as :func:`dtcomm.kernels.dispatch.low_rank_backend` says. Projections of
CUDA tensors are matrix products of torch either way. `dtcomm.compress.powersgd` calls this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch

from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import checks, cpu, dispatch, low_rank_torch
from dtcomm.kernels.dispatch import CUDA, REFERENCE, TORCH, current, low_rank_backend
from dtcomm.kernels.reference import low_rank as reference

MAX_RANK = 64  # kMaxRank in csrc/cpu/kernels.h


class Passes(Protocol):
    """An implementation of the passes, for checked arguments: `cpu`, `reference.low_rank`, `low_rank_torch`, `cuda`."""

    def project_rows(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        right: torch.Tensor,
        left: torch.Tensor,
    ) -> None:
        """See :func:`project_rows`."""

    def project_columns(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        left: torch.Tensor,
        right: torch.Tensor,
    ) -> None:
        """See :func:`project_columns`."""

    def expand(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        left: torch.Tensor,
        right: torch.Tensor,
        finite: torch.Tensor | None,
    ) -> None:
        """See :func:`expand`. `finite` is None on the CPU."""

    def orthonormalise(self, vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
        """See :func:`orthonormalise_all`. No tensor is empty."""


class DevicePasses(Passes, Protocol):
    """An implementation for CUDA tensors, which also answers on the device whether factors are finite."""

    def factors_finite(self, lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> torch.Tensor:
        """See :func:`factors_finite`: one bool tensor with an element per matrix."""


def project_rows(
    gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
) -> None:
    """``left[k, i] <- sum over j of matrix[i, j] * right[k, j]``.

    Raises TypeError or ValueError, which name the argument.
    """
    _check(gradient, residual, left, right)
    _passes(gradient).project_rows(gradient, residual, right, left)


def project_columns(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    """``right[k, j] <- sum over i of matrix[i, j] * left[k, i]``.

    Raises TypeError or ValueError, which name the argument.
    """
    _check(gradient, residual, left, right)
    _passes(gradient).project_columns(gradient, residual, left, right)


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
    if finite is not None and gradient.is_cpu:
        if not finite:
            gradient.fill_(float("nan"))
            return
        finite = None
    _passes(gradient).expand(gradient, residual, left, right, finite)


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
            checks.floats(name, factor, factor.numel(), torch.float32, like=lefts[0])
    return _device_passes().factors_finite(lefts, rights).unbind()


def orthonormalise(vectors: torch.Tensor, key: int = 0) -> None:
    """Make the rows of ``vectors`` (fp32 [count, n]) orthonormal, in order, by modified Gram-Schmidt run twice.

    A row that depends on the rows before it (a zero row, say) is replaced by a random one drawn with ``key``, or by
    zeros if there is no further direction. Rows with NaN or Inf stay. Raises TypeError or ValueError, which name the
    argument.
    """
    orthonormalise_all([vectors], [key])


def orthonormalise_all(vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
    """:func:`orthonormalise` for several tensors on one device, with a key each; on CUDA devices in one launch."""
    if len(vectors) != len(keys):
        raise ValueError(f"keys: expected {len(vectors)}, as many as vectors, got {len(keys)}")
    for tensor in vectors:
        checks.floats("vectors", tensor, tensor.numel(), torch.float32, like=vectors[0])
        if tensor.ndim != 2:
            raise ValueError(f"vectors: expected 2 dimensions, got {tensor.ndim}")
    checked = [(tensor, checks.uint64("key", key)) for tensor, key in zip(vectors, keys) if tensor.numel()]
    if checked:
        tensors, words = zip(*checked)
        _passes(tensors[0]).orthonormalise(tensors, words)


def _passes(tensor: torch.Tensor) -> Passes:
    """The implementation for the device of `tensor`: the only place that chooses one."""
    if not tensor.is_cpu:
        return _device_passes()
    return reference if current() == REFERENCE else cpu


def _pair_finite(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(left).all() & torch.isfinite(right).all()
    if not finite:
        left.zero_()
        right.zero_()
    return finite


def _device_passes() -> DevicePasses:
    return low_rank_torch if low_rank_backend() == TORCH else cast(DevicePasses, dispatch.load_backend(CUDA))


def _check(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    for name, factor in (("left", left), ("right", right)):
        checks.tensor(name, factor, gradient)
        if factor.ndim != 2 or factor.dtype != torch.float32:
            raise ValueError(f"{name}: expected fp32 [rank, n], got {factor.dtype} {tuple(factor.shape)}")
    (rank, rows), (other, columns) = left.shape, right.shape
    if rank != other or not 1 <= rank <= MAX_RANK:
        raise ValueError(f"right: expected 1 to {MAX_RANK} rows and as many as left's {rank}, got {other}")
    checks.floats("gradient", gradient, rows * columns, *FLOAT_TYPES)
    if residual is not None:
        checks.floats("residual", residual, rows * columns, torch.float32)
