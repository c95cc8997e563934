"""Encoding and decoding with codecs whose payloads have a length that depends on the data."""

from __future__ import annotations

import torch

from dtcomm import _C, errors
from dtcomm.codecs import Codec
from dtcomm.kernels import checks, dispatch
from dtcomm.kernels.reference import lossless as reference
from dtcomm.kernels.reference.floats import bytes_of


def encode(
    codec: Codec,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.encode`: the payload, a tensor of its own or the beginning of `out`."""
    if residual is not None:
        raise ValueError(f"residual: codec {str(codec)!r} loses nothing; expected None")
    numel, bound = x.numel(), codec.wire_bytes(x.numel(), x.dtype)
    if decoded is not None:
        checks.floats("decoded", decoded, numel, x.dtype, like=x)
    if out is not None:
        checks.payload("out", out, codec, numel, bound, like=x)
    kernel = dispatch.kernel_for(codec, "x", x)
    memory = x.new_empty(bound, dtype=torch.uint8) if out is None else out
    if kernel == dispatch.REFERENCE:
        payload = torch.from_numpy(reference.encode(bytes_of(x), x.itemsize))
        memory[: payload.numel()] = payload
        length = payload.numel()
    else:
        length = _C.encode_lossless(kernel, x.data_ptr(), numel, x.itemsize, memory.data_ptr())
    if decoded is not None and decoded is not x:
        decoded.view(-1).copy_(x.detach().view(-1))
    # A copy, because torch.save stores all of the memory that a view has a part of.
    return memory[:length].clone() if out is None else memory[:length]


def decode(
    codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.decode`: `payload` has the length that :func:`encode` gave it."""
    payload = checks.tensor("payload", payload)
    bound = codec.wire_bytes(numel, dtype)
    if payload.dtype != torch.uint8:
        raise TypeError(f"payload: expected uint8, got {payload.dtype}")
    if payload.numel() > bound:
        raise ValueError(
            f"payload: {numel} elements of {dtype} in codec {str(codec)!r} are at most {bound} bytes, "
            f"got {payload.numel()}"
        )
    if out is None:
        out = payload.new_empty(numel, dtype=dtype)
    else:
        checks.floats("out", out, numel, dtype, like=payload)
    kernel = dispatch.kernel_for(codec, "payload", payload)
    error = ""
    if kernel == dispatch.REFERENCE:
        try:
            bytes_of(out)[:] = reference.decode(payload.numpy(), numel, dtype.itemsize)
        except ValueError as reason:
            error = str(reason)
    else:
        error = _C.decode_lossless(
            kernel, payload.data_ptr(), payload.numel(), numel, dtype.itemsize, out.data_ptr()
        )
    if error:
        raise errors.PayloadCorrupt(f"payload in codec {str(codec)!r} {error}")
    return out
