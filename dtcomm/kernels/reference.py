"""The wire format in readable numpy: slow, and what every other kernel must equal bit for bit.

It assumes the thread's default floating-point environment (round to nearest, subnormals kept).
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dtcomm.codecs import Bf16, Codec, Fp16, Integer, Uncompressed
from dtcomm.kernels import mixer
from dtcomm.kernels.call import Combine

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint32]

INFINITY = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000).view(np.float32)


def combine(call: Combine) -> None:
    """Run one call (see :class:`Combine`)."""
    with np.errstate(all="ignore"):
        if call.codec.family == Uncompressed.family and call.dtype not in _FLOATS:
            _combine_exact(call)
        else:
            _combine_floats(call)


def decode(codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    """`out` <- the payload's `numel` elements; `dtype` is the wire type of `none`."""
    if isinstance(codec, Uncompressed) and out.dtype == dtype:
        _bytes(out)[:] = payload.numpy()[: numel * dtype.itemsize]
        return
    with np.errstate(all="ignore"):
        _put(out, _decode(codec, payload.numpy(), numel, dtype))


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _combine_floats(call: Combine) -> None:
    terms = [_decode(call.codec, payload.numpy(), call.numel, call.dtype) for payload in call.payloads]
    local = None if call.local is None else _get(call.local)
    if call.residual is not None:
        old = _get(call.residual)
        local = old if local is None else _canonical(local + old)
    if local is not None:
        terms.insert(call.position, local)
    total = terms[0]
    for term in terms[1:]:
        total = _canonical(_JOIN[call.op](total, term))
    if call.divisor != 1:
        total = _canonical(total / np.float32(call.divisor))

    if call.payload_out is None:
        if call.out is not None:
            copied = _copied(call)
            if copied is not None and call.out.dtype == call.dtype:
                _bytes(call.out)[:] = copied
            else:
                _put(call.out, total)
        if call.residual is not None:
            call.residual.zero_()
        return
    copied = _copied(call)
    encoded = _encode(call.codec, total, call.dtype, call.key, call.offset) if copied is None else copied
    payload = call.payload_out.numpy()
    payload[: len(encoded)] = encoded
    payload[len(encoded) :] = 0
    decoded = _decode(call.codec, payload, call.numel, call.dtype)
    if call.residual is not None:
        error = (total - decoded) * np.float32(call.divisor)
        _put(call.residual, np.where(np.isfinite(error), error, _get(call.residual)))
    if call.out is not None:
        if copied is not None and call.out.dtype == call.dtype:
            _bytes(call.out)[:] = copied
        else:
            _put(call.out, decoded)


def _copied(call: Combine) -> Bytes | None:
    """The bytes of a lone term of `none`, which is copied and not computed: NaN keeps its bits."""
    if not isinstance(call.codec, Uncompressed) or call.divisor != 1 or call.residual is not None:
        return None
    if not call.payloads and call.local is not None and call.local.dtype == call.dtype:
        return _bytes(call.local).copy()
    if len(call.payloads) == 1 and call.local is None:
        return call.payloads[0].numpy()[: call.numel * call.dtype.itemsize].copy()
    return None


def _combine_exact(call: Combine) -> None:
    """float64, integers (wrapping) and bool (logical), each in its own type."""
    kind = np.dtype(str(call.dtype).removeprefix("torch."))
    size = call.numel * kind.itemsize
    terms = [payload.numpy()[:size].view(kind) for payload in call.payloads]
    if call.local is not None:
        terms.insert(call.position, call.local.reshape(-1).numpy())
    total = terms[0]
    for term in terms[1:]:
        total = _JOIN[call.op](total.astype(kind), term.astype(kind))
        if kind == np.float64:
            total = np.where(np.isnan(total), np.float64("nan"), total)
    if call.divisor != 1:
        total = np.where(np.isnan(total), np.float64("nan"), total / np.float64(call.divisor))
    raw = np.ascontiguousarray(total).view(np.uint8)
    if call.payload_out is not None:
        payload = call.payload_out.numpy()
        payload[:size], payload[size:] = raw, 0
    if call.out is not None:
        _bytes(call.out)[:] = raw


def _add(a: Any, b: Any) -> Any:
    return a + b  # numpy's bool + bool is `or`


def _min(a: Any, b: Any) -> Any:
    return np.where((b < a) | (b != b), b, a)


def _max(a: Any, b: Any) -> Any:
    return np.where((b > a) | (b != b), b, a)


_JOIN = {"sum": _add, "min": _min, "max": _max}


def _encode(codec: Codec, x: Floats, dtype: torch.dtype, key: int, offset: int) -> Bytes:
    """The payload of `x`, without the padding after its last granule."""
    if not isinstance(codec, Integer):
        return narrow(_wire(codec, dtype), x)
    layout = codec.layout()
    granules = []
    for start in range(0, len(x), layout.granule):
        fields, codes = encode_blocks(codec, x[start : start + layout.granule], key, offset + start)
        granule = np.concatenate([*(_fields(codec, field) for field in fields), codes.reshape(-1)])
        granules.append(np.pad(granule, (0, -len(granule) % 16)))
    return np.concatenate(granules) if granules else np.zeros(0, np.uint8)


def _decode(codec: Codec, payload: Bytes, numel: int, dtype: torch.dtype) -> Floats:
    if not isinstance(codec, Integer):
        return widen(_wire(codec, dtype), payload[: numel * _wire(codec, dtype).itemsize])
    layout = codec.layout()
    parts, at = [np.zeros(0, np.float32)], 0
    for start in range(0, numel, layout.granule):
        n = min(layout.granule, numel - start)
        granule = payload[at : at + layout.bytes(n)]
        ends = [layout.blocks(n) * layout.field_bytes * i for i in range(layout.fields + 1)]
        fields = [_unpack(codec, granule[i:j]) for i, j in itertools.pairwise(ends)]
        codes = granule[layout.codes_at(n) : layout.used(n)].reshape(-1, layout.block)
        parts.append(decode_blocks(codec, fields, codes).reshape(-1)[:n])
        at += layout.bytes(n)
    return np.concatenate(parts)


def encode_blocks(codec: Integer, x: Floats, key: int, offset: int) -> tuple[list[Floats], Bytes]:
    """Scales (and zero points), one a block, and rows of codes, of the elements from index `offset` on."""
    missing = -len(x) % codec.block
    # The last block is filled up with its last element, which changes neither its scale nor its zero point.
    rows = np.pad(x, (0, missing), mode="edge").reshape(-1, codec.block)
    top = (rows.view(np.uint32) & 0x7FFFFFFF).max(axis=1)
    bad = top >= INFINITY
    lowest, highest = np.float32(-codec.levels), np.float32(codec.levels)
    if codec.symmetric:
        zero = np.zeros(len(rows), np.float32)
    else:
        lowest = np.float32(0)
        zero = np.where(bad, np.float32(0), zero_point(codec, rows.min(axis=1)))
        span = (rows.max(axis=1) - zero).view(np.uint32) & 0x7FFFFFFF
        top = np.where(bad, top, span)
        bad = top >= INFINITY
        zero = np.where(bad, np.float32(0), zero)
    scale = block_scale(codec, top)
    inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    t = np.clip((rows - zero[:, None]) * inverse[:, None], lowest, highest)
    t = np.where(bad[:, None], np.float32(0), t)
    if codec.round == "nearest":
        codes = np.rint(t)
    else:
        floor = np.floor(t)
        random = mixer.uniform(key, offset, t.size).reshape(t.shape)
        codes = floor + (random < t - floor)
    raw = codes.astype(np.int16).astype(np.uint8)
    raw.reshape(-1)[len(x) :] = 0
    return [scale] if codec.symmetric else [scale, zero], raw


def decode_blocks(codec: Integer, fields: list[Floats], codes: Bytes) -> Floats:
    """One row of fp32 a block."""
    values = (codes.view(np.int8) if codec.symmetric else codes).astype(np.float32) * fields[0][:, None]
    return values if codec.symmetric else fields[1][:, None] + values


def block_scale(codec: Integer, top: Words) -> Floats:
    """The scale of blocks whose largest magnitude (or range) has the bits `top`."""
    levels = np.float32(codec.levels)
    bits = (top.view(np.float32) / levels).view(np.uint32)
    cap = (np.finfo(np.float32).max / levels).view(np.uint32)
    with np.errstate(over="ignore"):
        cap -= np.uint32(np.isinf(cap.view(np.float32) * levels))
    if codec.scale == "bf16":
        nearest = codec.symmetric and codec.round == "nearest"  # other codes would be clipped: round up
        half = 0x7FFF + (bits >> 16 & 1) if nearest else np.full_like(bits, 0xFFFF)
        bits, cap = ((bits + half) & 0xFFFF0000).astype(np.uint32), cap & 0xFFFF0000
    rounded = np.minimum(bits, cap)
    rounded = np.where(rounded < 0x00800000, 0, rounded)
    return np.where(top >= INFINITY, NAN.view(np.uint32), rounded).astype(np.uint32).view(np.float32)


def zero_point(codec: Integer, lowest: Floats) -> Floats:
    """`lowest` rounded towards -Inf to the scale's type, but never to -Inf; -0 becomes +0."""
    bits = lowest.view(np.uint32)
    if codec.scale == "bf16":
        cut = bits & 0xFFFF0000
        away = (bits != cut) & (bits >> 31 == 1) & (cut != 0xFF7F0000)
        bits = np.where(away, cut + 0x10000, cut).astype(np.uint32)
    return bits.view(np.float32) + np.float32(0)


def narrow(dtype: torch.dtype, x: Floats) -> Bytes:
    """fp32 as the bytes of a floating type: nearest, ties to even; every NaN becomes the canonical one."""
    if dtype == torch.float32:
        return x.view(np.uint8)
    if dtype == torch.float16:
        halves = np.where(np.isnan(x), np.uint16(0x7E00), x.astype(np.float16).view(np.uint16))
    else:
        bits = x.view(np.uint32)
        halves = np.where(np.isnan(x), np.uint32(0x7FC0), bits + 0x7FFF + (bits >> 16 & 1) >> 16)
    return halves.astype(np.uint16).view(np.uint8)


def widen(dtype: torch.dtype, raw: Bytes) -> Floats:
    """The bytes of a floating type as fp32."""
    if dtype == torch.float32:
        return raw.view(np.float32)
    if dtype == torch.float16:
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _wire(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    if isinstance(codec, Fp16):
        return torch.float16
    return torch.bfloat16 if isinstance(codec, Bf16) else dtype


def _fields(codec: Integer, values: Floats) -> Bytes:
    return (
        values.view(np.uint8)
        if codec.scale == "fp32"
        else (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    )


def _unpack(codec: Integer, raw: Bytes) -> Floats:
    return widen(torch.float32 if codec.scale == "fp32" else torch.bfloat16, np.ascontiguousarray(raw))


def _canonical(x: Floats) -> Floats:
    return np.where(np.isnan(x), NAN, x)


def _bytes(tensor: torch.Tensor) -> Bytes:
    raw: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return raw


def _get(tensor: torch.Tensor) -> Floats:
    return widen(tensor.dtype, _bytes(tensor))


def _put(tensor: torch.Tensor, x: Floats) -> None:
    _bytes(tensor)[:] = narrow(tensor.dtype, x)
