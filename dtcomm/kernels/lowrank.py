"""The passes of low-rank compression (PowerSGD, Vogels et al. 2019, arXiv:1905.13727) over one matrix.

What is compressed is gradient + residual, read once a pass and never stored. Factors are fp32, one row per rank:
``left`` [rank, rows], ``right`` [rank, columns]; their product is ``left.T @ right``. All sums are taken in one
order, so that ranks with the same factors hold the same bits afterwards, whatever their CPUs.

A gradient is fp32, fp16 or bf16 [rows, columns] or flat; a residual fp32, of as many elements, or None. Both are
dense and on one device; on others than the CPU the passes are torch's (`lowrank_there`). ValueError and TypeError name
the argument.
"""

from __future__ import annotations

import torch

from dtcomm import _C
from dtcomm.codecs.base import ELEMENT_TYPES, FLOAT_TYPES
from dtcomm.kernels import checks, lowrank_there, native
from dtcomm.kernels.dispatch import REFERENCE, current
from dtcomm.kernels.reference import lowrank as reference

MOST_RANK = 64  # csrc/cpu/kernels.h's kMostRank


def project_rows(
    gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
) -> None:
    """``left[k, i] = sum over j of matrix[i, j] * right[k, j]``."""
    matrix = _matrix(gradient, residual, left, right)
    if not gradient.is_cpu:
        lowrank_there.project_rows(gradient, residual, right, left)
    elif current() == REFERENCE:
        reference.project_rows(gradient, residual, right, left)
    else:
        _C.project_rows(*matrix, right.data_ptr(), left.data_ptr())


def project_columns(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    """``right[k, j] = sum over i of matrix[i, j] * left[k, i]``."""
    matrix = _matrix(gradient, residual, left, right)
    if not gradient.is_cpu:
        lowrank_there.project_columns(gradient, residual, left, right)
    elif current() == REFERENCE:
        reference.project_columns(gradient, residual, left, right)
    else:
        _C.project_columns(*matrix, left.data_ptr(), right.data_ptr())


def expand(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    finite: torch.Tensor | None = None,
) -> None:
    """The gradient becomes the product of the factors, and the residual what gradient + residual had more.

    ``finite``, on a device: a bool there without dimensions; where it says no, which nobody waits to see, the gradient
    becomes NaN and the residual stays.
    """
    matrix = _matrix(gradient, residual, left, right)
    if not gradient.is_cpu:
        lowrank_there.expand(gradient, residual, left, right, finite)
    elif finite is not None:
        raise ValueError("finite: goes with tensors on a device; expected None")
    elif current() == REFERENCE:
        reference.expand(gradient, residual, left, right)
    else:
        _C.expand(*matrix, left.data_ptr(), right.data_ptr())


def orthonormalise(vectors: torch.Tensor, key: int = 0) -> None:
    """The rows of ``vectors`` (fp32 [count, n]) become orthonormal, in order: modified Gram-Schmidt, twice.

    A row that depends on those before it (a zero one, say) is replaced by a random one, drawn by ``key``; where
    there are no more directions by zeros. Rows that hold NaN or Inf stay as they are.
    """
    checks.floats("vectors", vectors, vectors.numel(), torch.float32)
    if vectors.ndim != 2:
        raise ValueError(f"vectors: expected 2 dimensions, got {vectors.ndim}")
    count, n = vectors.shape
    if vectors.numel() == 0:
        return
    if not vectors.is_cpu:
        lowrank_there.orthonormalise(vectors, checks.word("key", key))
    elif current() == REFERENCE:
        reference.orthonormalise(vectors, checks.word("key", key))
    else:
        _C.orthonormalise(native.current_name(), vectors.data_ptr(), count, n, checks.word("key", key))


def _matrix(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> tuple[str, int, int, int, int, int, int]:
    """The matrix as the native passes take it, after everything was checked."""
    for name, factor in (("left", left), ("right", right)):
        checks.tensor(name, factor, gradient)
        if factor.ndim != 2 or factor.dtype != torch.float32:
            raise ValueError(f"{name}: expected fp32 [rank, n], got {factor.dtype} {tuple(factor.shape)}")
    (rank, rows), (other, columns) = left.shape, right.shape
    if rank != other or not 1 <= rank <= MOST_RANK:
        raise ValueError(f"right: expected 1 to {MOST_RANK} rows and as many as left's {rank}, got {other}")
    checks.floats("gradient", gradient, rows * columns, *FLOAT_TYPES)
    if residual is not None:
        checks.floats("residual", residual, rows * columns, torch.float32)
    if not gradient.is_cpu:
        return "", 0, 0, 0, rows, columns, rank
    address = 0 if residual is None else residual.data_ptr()
    name = native.current_name()
    return name, gradient.data_ptr(), ELEMENT_TYPES[gradient.dtype], address, rows, columns, rank
