"""One call of a kernel, as every kernel takes it, and the protocol of a kernel module."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dtcomm.codecs import Codec

OPERATIONS = {"sum": 0, "min": 1, "max": 2}  # csrc/core/types.h's numbers


class Combine(NamedTuple):
    """One kernel call, with checked arguments: sum payloads and a local tensor, divide, encode, keep the error.

    It mirrors ``Combine`` in csrc/cpu/kernels.h. Every part is optional: without payloads it is an encoding, without
    ``payload_out`` a reduction. Tensors are contiguous, on one device and of the right size. It is a tuple because each
    call makes one: a frozen dataclass of so many fields takes longer to make than a kilobyte to encode.

    codec: The codec of `payloads` and `payload_out`.
    numel: Elements of every term.
    dtype: The type of the tensor that is encoded or reduced. `local` and `out` are of this type or float32.
    payloads: The encoded terms, in order.
    local: A term that is not encoded; it stands before ``payloads[position]``.
    residual: float32, added to `local` and overwritten with the error of the encoding.
    divisor: Divides the sum.
    op: sum, min or max.
    key, offset: Key of the random numbers, and the index of the first element in the caller's tensor.
    payload_out: Receives the encoding of the result.
    out: Receives the decoding of `payload_out`, or the result itself if there is no `payload_out`.
    """

    codec: Codec
    numel: int
    dtype: torch.dtype
    payloads: tuple[torch.Tensor, ...] = ()
    local: torch.Tensor | None = None
    position: int = 0
    residual: torch.Tensor | None = None
    divisor: int = 1
    op: str = "sum"
    key: int = 0
    offset: int = 0
    payload_out: torch.Tensor | None = None
    out: torch.Tensor | None = None


class DeviceKernels(Protocol):
    """A module of kernels for CUDA tensors: `dtcomm.kernels.cuda` or `dtcomm.kernels.triton`."""

    def combine(self, call: Combine) -> None:
        """Run one call."""

    def decode(
        self, codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor
    ) -> None:
        """`out` <- the `numel` elements of the payload; `dtype` is the element type that ``none`` has there."""
