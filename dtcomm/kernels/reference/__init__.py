"""The wire format in readable numpy: the reference that every other kernel must equal bit for bit.

It is slow and assumes the thread's default floating-point environment (round to nearest, subnormals kept). This
module runs whole calls: casts in one go, every other codec granule by granule, and option rotate=hadamard.

The functions for a granule are `encode` and `decode` of the module that the codec names (`Codec.reference`):
`integer`, `minifloat`, `sparse` or `reproducible`.

    encode(codec, x, key, index, feedback): The bytes of one granule without its padding. `index` is the index of its
        first element in the caller's tensor; `feedback` states that the error goes to a residual.
    decode(codec, granule, n): The n floats of one granule.

`floats` has the casts and what several codecs share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch

from dtcomm.codecs import Codec, Uncompressed
from dtcomm.kernels import counter_rng
from dtcomm.kernels.calls import Combine
from dtcomm.kernels.reference import integer, minifloat, reproducible, sparse
from dtcomm.kernels.reference.floats import (
    JOIN,
    Bytes,
    Floats,
    bytes_of,
    canonical,
    get,
    narrow,
    narrow_at_random,
    put,
    widen,
)

__all__ = ["combine", "decode", "rotate", "rotate_back", "rotates"]


class GranuleFunctions(Protocol):
    """A module of this package with the arithmetic of a codec."""

    encode: Callable[[Any, Floats, int, int, bool], Bytes]
    decode: Callable[[Any, Bytes, int], Floats]


_MODULES: Mapping[str, GranuleFunctions] = {
    module.__name__.rpartition(".")[2]: cast(GranuleFunctions, module)
    for module in (integer, minifloat, reproducible, sparse)
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROTATION_SEED = 8135563  # seed of the signs; docs/reference/wire-format.md says why this one


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


def _combine_floats(call: Combine) -> None:
    codec, numel, dtype = call.codec, call.numel, call.dtype
    terms = [_decode(codec, payload.numpy(), numel, dtype) for payload in call.payloads]
    local = None if call.local is None else get(call.local)
    if call.residual is not None:
        old = get(call.residual)
        local = old if local is None else canonical(local + old)
    if local is not None:
        terms.insert(call.position, rotate(codec, local) if rotates(codec) else local)
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
        encoded = _encode_granules(codec, total, dtype, call.key, call.offset, feedback=feedback)
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
    if rotates(codec):
        numel += -numel % codec.layout().block
    return _decode_granules(codec, payload, numel, dtype)


def _from_domain(codec: Codec, x: Floats, numel: int) -> Floats:
    """The floats of the tensor: rotated back if the codec rotates."""
    return rotate_back(codec, x, numel) if rotates(codec) else x


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


def _encode_granules(
    codec: Codec, x: Floats, dtype: torch.dtype, key: int, offset: int, *, feedback: bool = False
) -> Bytes:
    """The payload of `x`, without the padding after a cast's last granule."""
    wire_dtype = codec.wire_dtype(dtype)
    if wire_dtype is not None and getattr(codec, "round", "nearest") == "stochastic":
        return narrow_at_random(x, counter_rng.uniform(key, offset, len(x)))
    if wire_dtype is not None:
        return narrow(wire_dtype, x)
    module, layout = _MODULES[codec.reference], codec.layout()
    granules = [np.zeros(0, np.uint8)]
    for start in range(0, len(x), layout.granule):
        granule = module.encode(codec, x[start : start + layout.granule], key, offset + start, feedback)
        granules.append(np.pad(granule, (0, -len(granule) % 16)))
    return np.concatenate(granules)


def _decode_granules(codec: Codec, payload: Bytes, numel: int, dtype: torch.dtype) -> Floats:
    wire_dtype = codec.wire_dtype(dtype)
    if wire_dtype is not None:
        return widen(wire_dtype, payload[: numel * wire_dtype.itemsize])
    module, layout = _MODULES[codec.reference], codec.layout()
    parts, at = [np.zeros(0, np.float32)], 0
    for start in range(0, numel, layout.granule):
        n = min(layout.granule, numel - start)
        parts.append(module.decode(codec, payload[at : at + layout.bytes(n)], n))
        at += layout.bytes(n)
    return np.concatenate(parts)


def rotates(codec: Codec) -> bool:
    """Whether terms of the codec are added in the rotated domain."""
    return getattr(codec, "rotate", "none") == "hadamard"


def rotate(codec: Codec, x: Floats) -> Floats:
    """`x` as whole rotated blocks; the last block is padded with zeros."""
    block = codec.layout().block
    rows = np.pad(x, (0, -len(x) % block)).reshape(-1, block)
    return _butterflies(rows * _signs(block) * _norm(block)).reshape(-1)


def rotate_back(codec: Codec, rotated: Floats, numel: int) -> Floats:
    """The `numel` floats whose rotation is `rotated`."""
    block = codec.layout().block
    rows = _butterflies(rotated.reshape(-1, block) * _norm(block)) * _signs(block)
    return canonical(rows.reshape(-1)[:numel])


def _signs(block: int) -> Floats:
    """1 or -1 for each element of a block."""
    words = counter_rng.mix32(np.arange(block, dtype=np.uint32) + np.uint32(ROTATION_SEED))
    return np.where(words >> np.uint32(31) == 1, np.float32(-1), np.float32(1))


def _norm(block: int) -> np.float32:
    return np.float32(1 / np.sqrt(np.float64(block)))


def _butterflies(rows: Floats) -> Floats:
    """Each row times the Hadamard matrix: neighbours first, halves of the block last."""
    shape, half = rows.shape, 1
    while half < shape[1]:
        pairs = rows.reshape(shape[0], shape[1] // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack([first + second, first - second], axis=2).reshape(shape)
        half *= 2
    return rows
