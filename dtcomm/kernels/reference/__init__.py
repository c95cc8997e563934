"""The wire format in readable numpy: the reference that every other kernel must equal bit for bit.

It is slow and assumes the thread's default floating-point environment (round to nearest, subnormals kept). Each codec
names its module here: `float8`, `integer` (with `outliers` for option spikes), `mx`, `reproducible`, `sign`, `sparse`;
`hadamard` is option rotate, `floats` the casts, `scales` and `minifloat` what several share. `low_rank`,
`shared_randk` and `epilogue` are the references of the kernels of those names.
"""

from __future__ import annotations

import numpy as np
import torch

from dtcomm.codecs import Codec, Uncompressed
from dtcomm.kernels.reference import granules, hadamard
from dtcomm.kernels.reference.floats import JOIN, Bytes, Floats, bytes_of, canonical, get, put
from dtcomm.kernels.types import Combine

__all__ = ["combine", "decode"]


def combine(call: Combine) -> None:
    """Run one call (see :class:`Combine`)."""
    with np.errstate(all="ignore"):
        if call.codec.family == Uncompressed.family and call.dtype not in _FLOATS:
            _combine_native(call)
        else:
            _combine_floats(call)


def decode(codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    """`out` <- the `numel` elements of the payload; `dtype` is the element type that ``none`` has there."""
    if isinstance(codec, Uncompressed) and out.dtype == dtype:
        bytes_of(out)[:] = payload.numpy()[: numel * dtype.itemsize]
        return
    with np.errstate(all="ignore"):
        put(out, _from_domain(codec, _decode(codec, payload.numpy(), numel, dtype), numel))


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _combine_floats(call: Combine) -> None:
    codec, numel, dtype = call.codec, call.numel, call.dtype
    terms = [_decode(codec, payload.numpy(), numel, dtype) for payload in call.payloads]
    local = None if call.local is None else get(call.local)
    if call.residual is not None:
        old = get(call.residual)
        local = old if local is None else canonical(local + old)
    if local is not None:
        terms.insert(call.position, hadamard.rotate(codec, local) if hadamard.rotates(codec) else local)
    total = terms[0]
    for term in terms[1:]:
        total = canonical(JOIN[call.op](total, term))
    if call.divisor != 1:
        total = canonical(total / np.float32(call.divisor))

    if call.payload_out is None:
        if call.out is not None:
            copied = _copied(call)
            if copied is not None and call.out.dtype == call.dtype:
                bytes_of(call.out)[:] = copied
            else:
                put(call.out, _from_domain(codec, total, numel))
        if call.residual is not None:
            call.residual.zero_()
        return
    copied = _copied(call)
    encoded = copied
    if encoded is None:
        feedback = call.residual is not None
        encoded = granules.encode(codec, total, dtype, call.key, call.offset, feedback=feedback)
    payload = call.payload_out.numpy()
    payload[: len(encoded)] = encoded
    payload[len(encoded) :] = 0
    decoded = _decode(codec, payload, numel, dtype)
    if call.residual is not None:
        error = _from_domain(codec, total - decoded, numel) * np.float32(call.divisor)
        put(call.residual, np.where(np.isfinite(error), error, get(call.residual)))
    if call.out is not None:
        if copied is not None and call.out.dtype == call.dtype:
            bytes_of(call.out)[:] = copied
        else:
            put(call.out, _from_domain(codec, decoded, numel))


def _decode(codec: Codec, payload: Bytes, numel: int, dtype: torch.dtype) -> Floats:
    """The floats of a payload as terms of a sum: whole rotated blocks if the codec rotates."""
    if hadamard.rotates(codec):
        numel += -numel % codec.layout().block
    return granules.decode(codec, payload, numel, dtype)


def _from_domain(codec: Codec, x: Floats, numel: int) -> Floats:
    """The floats of the tensor: rotated back if the codec rotates."""
    return hadamard.rotate_back(codec, x, numel) if hadamard.rotates(codec) else x


def _copied(call: Combine) -> Bytes | None:
    """The bytes of a single term of ``none``, which is copied, so NaN keeps its bits; None if the call computes."""
    if not isinstance(call.codec, Uncompressed) or call.divisor != 1 or call.residual is not None:
        return None
    if not call.payloads and call.local is not None and call.local.dtype == call.dtype:
        return bytes_of(call.local).copy()
    if len(call.payloads) == 1 and call.local is None:
        return call.payloads[0].numpy()[: call.numel * call.dtype.itemsize].copy()
    return None


def _combine_native(call: Combine) -> None:
    """Reduce float64, integers (wrapping) and bool (logical) in their own type."""
    kind = np.dtype(str(call.dtype).removeprefix("torch."))
    size = call.numel * kind.itemsize
    terms = [payload.numpy()[:size].view(kind) for payload in call.payloads]
    if call.local is not None:
        terms.insert(call.position, call.local.reshape(-1).numpy())
    total = terms[0]
    for term in terms[1:]:
        total = JOIN[call.op](total.astype(kind), term.astype(kind))
        if kind == np.float64:
            total = np.where(np.isnan(total), np.float64("nan"), total)
    if call.divisor != 1:
        total = np.where(np.isnan(total), np.float64("nan"), total / np.float64(call.divisor))
    raw = np.ascontiguousarray(total).view(np.uint8)
    if call.payload_out is not None:
        payload = call.payload_out.numpy()
        payload[:size], payload[size:] = raw, 0
    if call.out is not None:
        bytes_of(call.out)[:] = raw
