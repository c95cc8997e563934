"""The passes of low-rank compression (PowerSGD, Vogels et al. 2019, arXiv:1905.13727) over one matrix.

What is compressed is gradient + residual, read once a pass and never stored. Factors are fp32, one row per rank:
``left`` [rank, rows], ``right`` [rank, columns]; their product is ``left.T @ right``. All sums are taken in one
order, so that ranks with the same factors hold the same bits afterwards, whatever their CPUs.

A gradient is fp32, fp16 or bf16 [rows, columns] or flat; a residual fp32, of as many elements, or None. Both are
dense and on one device. On others than the CPU projections are torch's matrix products (`lowrank_there`); the other
passes are kernels of CUDA with the CPU's bits, or torch's operators, as
:func:`dtcomm.kernels.dispatch.low_rank_backend` says. ValueError and TypeError name the argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm import _C
from dtcomm.codecs.base import ELEMENT_TYPES, FLOAT_TYPES
from dtcomm.kernels import checks, dispatch, low_rank_torch
from dtcomm.kernels.dispatch import CUDA, REFERENCE, TORCH, current, low_rank_backend
from dtcomm.kernels.reference import low_rank as reference

MOST_RANK = 64  # csrc/cpu/kernels.h's kMostRank


def project_rows(
    gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
) -> None:
    """``left[k, i] = sum over j of matrix[i, j] * right[k, j]``."""
    matrix = _matrix(gradient, residual, left, right)
    if not gradient.is_cpu:
        low_rank_torch.project_rows(gradient, residual, right, left)
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
        low_rank_torch.project_columns(gradient, residual, left, right)
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
        there = low_rank_torch if low_rank_backend() == TORCH else dispatch.load_backend(CUDA)
        there.expand(gradient, residual, left, right, finite)
    elif finite is not None:
        raise ValueError("finite: goes with tensors on a device; expected None")
    elif current() == REFERENCE:
        reference.expand(gradient, residual, left, right)
    else:
        _C.expand(*matrix, left.data_ptr(), right.data_ptr())


def factors_finite(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Whether the factors of each matrix are finite: bools on their device, as `expand` takes them, which nobody waits
    to see. Where one factor is not both become zeros. On devices alone: on the CPU look.
    """
    if len(lefts) != len(rights):
        raise ValueError(f"rights: expected {len(lefts)}, as many as lefts, got {len(rights)}")
    for name, factors in (("lefts", lefts), ("rights", rights)):
        for each in factors:
            checks.floats(name, each, each.numel(), torch.float32, like=lefts[0])
            if each.is_cpu:
                raise ValueError(f"{name}: expected tensors on a device, got one on {each.device}")
    if not lefts:
        return []
    there = low_rank_torch if low_rank_backend() == TORCH else dispatch.load_backend(CUDA)
    found: torch.Tensor = there.factors_finite(lefts, rights)
    return found.unbind()


def orthonormalise(vectors: torch.Tensor, key: int = 0) -> None:
    """The rows of ``vectors`` (fp32 [count, n]) become orthonormal, in order: modified Gram-Schmidt, twice.

    A row that depends on those before it (a zero one, say) is replaced by a random one, drawn by ``key``; where
    there are no more directions by zeros. Rows that hold NaN or Inf stay as they are.
    """
    orthonormalise_all([vectors], [key])


def orthonormalise_all(vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
    """:func:`orthonormalise` for each of ``vectors``, all on one device, with a key each: there as one kernel."""
    if len(vectors) != len(keys):
        raise ValueError(f"keys: expected {len(vectors)}, as many as vectors, got {len(keys)}")
    for each in vectors:
        checks.floats("vectors", each, each.numel(), torch.float32, like=vectors[0])
        if each.ndim != 2:
            raise ValueError(f"vectors: expected 2 dimensions, got {each.ndim}")
    there = [(each, checks.word("key", key)) for each, key in zip(vectors, keys) if each.numel()]
    if there and not there[0][0].is_cpu and low_rank_backend() == CUDA:
        dispatch.load_backend(CUDA).orthonormalise([each for each, _ in there], [word for _, word in there])
        return
    for each, key in there:
        if not each.is_cpu:
            low_rank_torch.orthonormalise(each, key)
        elif current() == REFERENCE:
            reference.orthonormalise(each, key)
        else:
            count, n = each.shape
            _C.orthonormalise(dispatch.native_kernel(), each.data_ptr(), count, n, key)


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
    name = dispatch.native_kernel()
    return name, gradient.data_ptr(), ELEMENT_TYPES[gradient.dtype], address, rows, columns, rank
