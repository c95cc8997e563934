"""The C++ kernels for CPU tensors: one source, built once per instruction set.

docs/reference/wire-format.md specifies what they compute. Callers have checked the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels import dispatch
from dtcomm.kernels.calls import OPERATIONS, CallGroup, Combine, Runner, address

# Outputs of at least this size are written around the cache. With a 32 MB L3 cache and a reader that comes next,
# ordinary stores are up to twice as fast at 8 MB and below; streaming stores are 1.2 to 1.4 times as fast at 32 MB.
STREAM_BYTES = 16 << 20


def combine(kernel: str, call: Combine) -> None:
    """Run one call (see :class:`Combine`) with the native build called `kernel`."""
    dtype = ELEMENT_TYPES[call.dtype]
    residual = address(call.residual)
    _C.combine(
        kernel,
        call.codec.native_bytes,
        [payload.data_ptr() for payload in call.payloads],
        call.position,
        address(call.local),
        dtype if call.local is None else ELEMENT_TYPES[call.local.dtype],
        residual,
        residual,
        call.numel,
        call.divisor,
        OPERATIONS[call.op],
        call.key,
        call.offset,
        address(call.payload_out),
        address(call.out),
        dtype,
        dtype if call.out is None else ELEMENT_TYPES[call.out.dtype],
        _streams(call.payload_out),
        _streams(call.out),
    )


def prepare(kernel: str, group: CallGroup) -> Runner:
    """Return what runs the calls of a group, one after the other, with one native call."""
    calls = _C.GroupedCalls(*group.native())
    return lambda tensors, seed: calls.run(kernel, tensors.addresses, seed)


def decode(
    kernel: str, codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor
) -> None:
    """`out` <- the `numel` elements of the payload; `dtype` is the element type that ``none`` has there."""
    _C.decode(
        kernel,
        codec.native_bytes,
        payload.data_ptr(),
        numel,
        ELEMENT_TYPES[dtype],
        out.data_ptr(),
        ELEMENT_TYPES[out.dtype],
        _streams(out),
    )


def project_rows(
    gradient: torch.Tensor, residual: torch.Tensor | None, right: torch.Tensor, left: torch.Tensor
) -> None:
    """:func:`dtcomm.kernels.low_rank.project_rows`."""
    _C.project_rows(*_matrix(gradient, residual, left, right), right.data_ptr(), left.data_ptr())


def project_columns(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    """:func:`dtcomm.kernels.low_rank.project_columns`."""
    _C.project_columns(*_matrix(gradient, residual, left, right), left.data_ptr(), right.data_ptr())


def expand(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> None:
    """:func:`dtcomm.kernels.low_rank.expand`, of finite factors."""
    _C.expand(*_matrix(gradient, residual, left, right), left.data_ptr(), right.data_ptr())


def orthonormalize(vectors: Sequence[torch.Tensor], keys: Sequence[int]) -> None:
    """:func:`dtcomm.kernels.low_rank.orthonormalize_all`."""
    for tensor, key in zip(vectors, keys, strict=True):
        count, n = tensor.shape
        _C.orthonormalize(dispatch.native_kernel(), tensor.data_ptr(), count, n, key)


def _matrix(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> tuple[str, int, int, int, int, int, int]:
    """The first arguments of a native pass: kernel, gradient, dtype, residual, rows, columns, rank."""
    (rank, rows), columns = left.shape, right.shape[1]
    native, dtype = dispatch.native_kernel(), ELEMENT_TYPES[gradient.dtype]
    return native, gradient.data_ptr(), dtype, address(residual), rows, columns, rank


def _streams(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.numel() * tensor.itemsize >= STREAM_BYTES
