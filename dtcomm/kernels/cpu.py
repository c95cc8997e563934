"""The C++ kernels: one source, built once per instruction set; docs/reference/wire-format.md says what they compute."""

from __future__ import annotations

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels.types import OPERATIONS, Combine

# From this many bytes on an output is written around the cache. With a 32 MB L3, and a reader that comes next,
# ordinary stores are up to twice as fast at 8 MB and below, streaming ones 1.2 to 1.4 times as fast at 32 MB.
STREAM_BYTES = 16 << 20


def combine(kernel: str, call: Combine) -> None:
    """Run one call (see :class:`Combine`) with the build called `kernel`."""
    dtype = ELEMENT_TYPES[call.dtype]
    residual = _address(call.residual)
    _C.combine(
        kernel,
        call.codec.native(),
        [payload.data_ptr() for payload in call.payloads],
        call.position,
        _address(call.local),
        dtype if call.local is None else ELEMENT_TYPES[call.local.dtype],
        residual,
        residual,
        call.numel,
        call.divisor,
        OPERATIONS[call.op],
        call.key,
        call.offset,
        _address(call.payload_out),
        _address(call.out),
        dtype,
        dtype if call.out is None else ELEMENT_TYPES[call.out.dtype],
        _streams(call.payload_out),
        _streams(call.out),
    )


def decode(
    kernel: str, codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor
) -> None:
    """`out` <- the payload's `numel` elements; `dtype` is the wire type of `none`."""
    _C.decode(
        kernel,
        codec.native(),
        payload.data_ptr(),
        numel,
        ELEMENT_TYPES[dtype],
        out.data_ptr(),
        ELEMENT_TYPES[out.dtype],
        _streams(out),
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _streams(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.numel() * tensor.itemsize >= STREAM_BYTES
