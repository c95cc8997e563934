"""Codecs int8 to int2, intv and sign: integer codes or signs, with a scale per block.

Option spikes=1 of the integer codecs stores the smallest and the largest element of each block, its outliers, apart
from the codes.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from dtcomm.codecs import Integer, Sign, VariableInteger
from dtcomm.codecs.base import VARIABLE_GRANULE
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference.floats import (
    INFINITY,
    NAN,
    Bytes,
    Floats,
    block_scale,
    canonical,
    inverse,
    load_fields,
    magnitude,
    narrow,
    rows_of,
    store_fields,
    widen,
    zero_point,
)

LARGEST_SCALE = {"bf16": np.uint32(0x7F7F0000), "fp32": np.uint32(0x7F7FFFFF)}
# Codec intv. Of a block's byte: the sign of its step, and the fields of zero blocks and NaN blocks.
FLIPPED, ZERO, NAN_FIELD = 128, 0, 127
SCALE_SHIFT, MANTISSA_BITS = 20, 3  # of the scale in the bits of an fp32
SMALLEST_SCALE, LARGEST_WIDE_SCALE, SCALE_OF_INFINITY = 0x48, 0x7F7, 0x7F8
WIDEST = 8
WORD_BYTES, LEVEL_BITS = 4, 16  # what a granule has once: its level and, above it, its base

Numbers = npt.NDArray[np.int64]


def encode(codec: Integer | VariableInteger | Sign, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding."""
    if isinstance(codec, Integer):
        return encode_integer(codec, x, key, index)
    return _encode_variable(codec, x) if isinstance(codec, VariableInteger) else _encode_sign(codec, x)


def decode(codec: Integer | VariableInteger | Sign, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    if isinstance(codec, Integer):
        return decode_integer(codec, granule, n)
    if isinstance(codec, VariableInteger):
        return _decode_variable(codec, granule, n)
    return _decode_sign(codec, granule, n)


def encode_integer(codec: Integer, x: Floats, key: int, index: int) -> Bytes:
    """One granule, without its padding."""
    apart = np.zeros(0, np.uint8)
    if codec.spikes:
        x, apart = take_outliers(codec, x, key, index)
    fields, codes = encode_blocks(codec, x, key, index)
    stored = [store_fields(field, codec.scale) for field in fields]
    return np.concatenate([*stored, apart, pack_codes(codes.reshape(-1), codec.bits)])


def decode_integer(codec: Integer, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    layout = codec.layout()
    ends = [layout.blocks(n) * layout.field_bytes * i for i in range(layout.fields + 1)]
    fields = [load_fields(granule[i:j], codec.scale) for i, j in itertools.pairwise(ends)]
    bad = ~np.isfinite(fields).all(axis=0)
    fields = [np.where(bad, NAN, field) for field in fields]
    codes = unpack_codes(granule[layout.codes_at(n) : layout.used(n)], codec.bits)
    x = canonical(decode_blocks(codec, fields, codes.reshape(-1, layout.block)).reshape(-1)[:n])
    return put_outliers_back(codec, x, granule) if codec.spikes else x


def units(bits: int) -> tuple[int, ...]:
    """The widths of the bit planes of codes of `bits` bits, in order."""
    return tuple(unit for unit in (8, 4, 2, 1) if bits & unit)


def pack_codes(codes: Bytes, bits: int) -> Bytes:
    """The bit planes of `codes`, which are bytes of which the lower `bits` bits are used."""
    digits = np.unpackbits(codes[:, None], axis=1, bitorder="little")
    ends = [0, *itertools.accumulate(units(bits))]
    return np.concatenate(
        [np.packbits(digits[:, i:j].reshape(-1), bitorder="little") for i, j in itertools.pairwise(ends)]
    )


def unpack_codes(planes: Bytes, bits: int) -> Bytes:
    """The inverse of :func:`pack_codes`: unsigned codes."""
    count = len(planes) * 8 // bits
    digits = np.unpackbits(planes, bitorder="little")
    ends = [0, *itertools.accumulate(units(bits))]
    columns = [digits[count * i : count * j].reshape(count, j - i) for i, j in itertools.pairwise(ends)]
    return np.packbits(np.concatenate(columns, axis=1), axis=1, bitorder="little").reshape(-1)


def encode_blocks(codec: Integer, x: Floats, key: int, index: int) -> tuple[list[Floats], Bytes]:
    """Scales (and zero points), one per block, and rows of codes; `index` is the index of the first element."""
    rows = rows_of(x, codec.block)
    top = magnitude(rows).max(axis=1)
    bad = top >= INFINITY
    lowest, highest = np.float32(-codec.levels), np.float32(codec.levels)
    if codec.symmetric:
        zero = np.zeros(len(rows), np.float32)
    else:
        lowest = np.float32(0)
        zero = np.where(bad, np.float32(0), zero_point(rows.min(axis=1), codec.scale))
        top = np.where(bad, top, magnitude(rows.max(axis=1) - zero))
        bad = top >= INFINITY
        zero = np.where(bad, np.float32(0), zero)
    # Asymmetric or stochastic codes would be clipped if the scale were too small, so it is rounded up.
    up = not codec.symmetric or codec.round == "stochastic"
    scale = block_scale(top, codec.levels, codec.scale, up=up)
    t = np.clip((rows - zero[:, None]) * inverse(scale)[:, None], lowest, highest)
    t = np.where(bad[:, None], np.float32(0), t)
    if codec.round == "nearest":
        codes = np.rint(t)
    else:
        floor = np.floor(t)
        random = counter_rng.uniform(key, index, t.size).reshape(t.shape)
        codes = floor + (random < t - floor)
    raw = codes.astype(np.int16).astype(np.uint8)
    raw.reshape(-1)[len(x) :] = 0
    return [scale] if codec.symmetric else [scale, zero], raw


def decode_blocks(codec: Integer, fields: list[Floats], codes: Bytes) -> Floats:
    """The values of the codes: one row of fp32 per block."""
    numbers = codes.astype(np.int16)
    if codec.symmetric:  # two's complement of `bits` bits
        numbers -= (numbers >> codec.bits - 1) << codec.bits
    values = numbers.astype(np.float32) * fields[0][:, None]
    return values if codec.symmetric else fields[1][:, None] + values


def take_outliers(codec: Integer, x: Floats, key: int, index: int) -> tuple[Floats, Bytes]:
    """The granule `x` with both outliers of each block replaced by another element, and the outlier section.

    The section has two values per block, then two positions per block. NaN blocks are not changed.
    """
    rows = rows_of(x, codec.block)
    size = magnitude(rows).astype(np.int64)
    order = np.where(np.signbit(rows), -1 - size, size)
    places = np.stack([order.argmin(axis=1), order.argmax(axis=1)], axis=1)
    bad = magnitude(rows).max(axis=1) >= INFINITY
    places[bad] = 0
    values = np.where(bad[:, None], NAN, np.take_along_axis(rows, places, axis=1))
    if codec.scale == "bf16":
        random = counter_rng.uniform(key, index, rows.size).reshape(rows.shape)
        values = _bf16(
            values, np.take_along_axis(random, places, axis=1) if codec.round == "stochastic" else None
        )

    exists = np.arange(rows.size).reshape(rows.shape) < len(x)
    free = exists & (np.arange(codec.block) != places[:, :1]) & (np.arange(codec.block) != places[:, 1:])
    filler = np.where(free.any(axis=1), rows[np.arange(len(rows)), free.argmax(axis=1)], np.float32(0))
    taken = exists & ~free & ~bad[:, None]
    filled = np.where(taken, filler[:, None], rows).reshape(-1)[: len(x)]
    stored = store_fields(canonical(values).reshape(-1), codec.scale)
    return filled, np.concatenate([stored, places.astype(_place_type(codec)).reshape(-1).view(np.uint8)])


def put_outliers_back(codec: Integer, x: Floats, granule: Bytes) -> Floats:
    """The decoded granule `x` with its outliers put back. Positions outside a block are ignored."""
    layout = codec.layout()
    blocks, start = layout.blocks(len(x)), layout.spikes_at(len(x))
    middle = start + 2 * blocks * layout.field_bytes
    values = canonical(load_fields(granule[start:middle], codec.scale)).reshape(blocks, 2)
    raw = np.ascontiguousarray(granule[middle : layout.codes_at(len(x))])
    places = raw.view(_place_type(codec)).astype(np.int64).reshape(blocks, 2)
    at = places + codec.block * np.arange(blocks)[:, None]
    valid = (places < codec.block) & (at < len(x))
    x = x.copy()
    for which in (0, 1):
        x[at[valid[:, which], which]] = values[valid[:, which], which]
    return x


def _place_type(codec: Integer) -> type[np.unsignedinteger]:
    return np.uint8 if codec.block <= 256 else np.uint16


def _bf16(values: Floats, random: Floats | None) -> Floats:
    """`values` rounded to bf16, to nearest (ties to even) or with `random`, but never to Inf; NaN stays."""
    bits = values.view(np.uint32).astype(np.int64)
    step = 0x7FFF + (bits >> 16 & 1) if random is None else (random * np.float32(65536)).astype(np.int64)
    cut = (bits + step) & 0xFFFF0000
    cut = np.where((cut & 0x7FFFFFFF) >= 0x7F800000, cut - 0x10000, cut)
    return np.where(np.isfinite(values), cut.astype(np.uint32).view(np.float32), values)


def _encode_sign(codec: Sign, x: Floats) -> Bytes:
    rows = np.pad(x, (0, -len(x) % codec.block)).reshape(-1, codec.block)
    parts = np.abs(rows) * np.float32(1 / codec.block)
    while parts.shape[1] > 1:
        first, second = np.split(parts, 2, axis=1)
        parts = first + second
    mean = parts[:, 0]
    bad = ~np.isfinite(mean)
    if len(x) % codec.block:
        mean = mean.copy()
        mean[-1] /= np.float32(len(x) % codec.block / codec.block)
    kind = torch.bfloat16 if codec.scale == "bf16" else torch.float32
    scale = widen(kind, narrow(kind, np.where(bad, np.float32(0), mean)))
    scale = np.minimum(scale, LARGEST_SCALE[codec.scale].view(np.float32))
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    bits = np.signbit(rows) & (~bad & (scale > 0))[:, None]
    codes = np.packbits(bits.reshape(-1), bitorder="little")
    return np.concatenate([store_fields(np.where(bad, NAN, scale), codec.scale), codes])


def _decode_sign(codec: Sign, granule: Bytes, n: int) -> Floats:
    layout = codec.layout()
    scale = load_fields(granule[: layout.codes_at(n)], codec.scale)
    bits = np.unpackbits(granule[layout.codes_at(n) : layout.used(n)], bitorder="little")
    negative = bits.reshape(-1, codec.block) == 1
    return canonical(np.where(negative, -scale[:, None], scale[:, None])).reshape(-1)[:n]


def _encode_variable(codec: VariableInteger, x: Floats) -> Bytes:
    """One granule; its padding holds codes."""
    rows = rows_of(x, codec.block)
    top = magnitude(rows).max(axis=1).astype(np.int64)
    bad = top >= int(INFINITY)
    scale = np.minimum(top + (1 << SCALE_SHIFT) - 1 >> SCALE_SHIFT, LARGEST_WIDE_SCALE)
    scale = np.where(bad | (scale < SMALLEST_SCALE), 0, scale)
    base = max(int(scale.max()) - (NAN_FIELD - 1), 0)
    field = np.where(bad, NAN_FIELD, np.maximum(scale - base, ZERO))
    # The largest magnitude becomes the code -2^(w - 1), for which the step has the opposite sign.
    flipped = (field != ZERO) & ~bad & (np.ascontiguousarray(rows).view(np.int32).max(axis=1) == top)

    level = _level(codec, field, _budget(codec, len(x)))
    width = _widths(codec, field, level)
    out = np.zeros(codec.layout().bytes(len(x)), np.uint8)
    out[: len(rows)] = field + np.where(flipped, FLIPPED, 0)
    out[-WORD_BYTES:] = np.array([base << LEVEL_BITS | level], "<u4").view(np.uint8)
    step = _steps(scale, width, flipped)
    inverse = np.where(width > 0, np.float32(1) / step, np.float32(0))
    at = len(rows)
    for b in np.flatnonzero(width):
        half = 1 << int(width[b]) - 1
        codes = np.rint(np.clip(rows[b] * inverse[b], np.float32(-half), np.float32(half - 1)))
        raw = codes.astype(np.int16).astype(np.uint8)
        raw[len(x) - b * codec.block :] = 0
        planes = pack_codes(raw, int(width[b]))
        out[at : at + len(planes)] = planes
        at += len(planes)
    return out


def _decode_variable(codec: VariableInteger, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    blocks = codec.layout().blocks(n)
    (word,) = np.ascontiguousarray(granule[-WORD_BYTES:]).view("<u4").tolist()
    field = granule[:blocks].astype(np.int64) % FLIPPED
    flipped = granule[:blocks] >= FLIPPED
    width = _widths(codec, field, word % (1 << LEVEL_BITS))
    end = np.cumsum(width)
    width = np.where(end <= _budget(codec, n), width, 0)  # no encoder exceeds the budget
    scale = field + (word >> LEVEL_BITS)
    bad = (field == NAN_FIELD) | ((field != ZERO) & (scale >= SCALE_OF_INFINITY))
    step = _steps(np.where(bad, 0, scale), width, flipped)
    out = np.zeros((blocks, codec.block), np.float32)
    for b in np.flatnonzero((width > 0) & ~bad):
        bits, size = int(width[b]), int(width[b]) * codec.block // 8
        at = blocks + int(end[b]) * codec.block // 8 - size
        codes = unpack_codes(granule[at : at + size], bits).astype(np.int16)
        codes -= (codes >> bits - 1) << bits
        out[b] = codes.astype(np.float32) * step[b] + np.float32(0)
    out[bad] = NAN
    return canonical(out.reshape(-1)[:n])


def _budget(codec: VariableInteger, n: int) -> int:
    """The sum of the widths that a granule of `n` elements has room for."""
    layout = codec.layout()
    return (layout.bytes(n) - layout.blocks(n) - WORD_BYTES) * 8 // codec.block


def _widths(codec: VariableInteger, field: Numbers, level: int) -> Numbers:
    """The width of each block. No two blocks have the same key: a step of `level` changes one width at most by one."""
    per_granule = VARIABLE_GRANULE // codec.block
    octave = per_granule << MANTISSA_BITS
    key = field * per_granule + np.arange(len(field)) + WIDEST * octave
    width = np.clip((key - level) // octave, 0, WIDEST)
    return np.where((field == ZERO) | (field == NAN_FIELD), 0, width)


def _level(codec: VariableInteger, field: Numbers, budget: int) -> int:
    """The least level at which the widths do not exceed the budget."""
    low, high = 0, (1 << LEVEL_BITS) - 1
    while low < high:
        middle = (low + high) // 2
        if _widths(codec, field, middle).sum() <= budget:
            high = middle
        else:
            low = middle + 1
    return low


def _steps(scale: Numbers, width: Numbers, flipped: npt.NDArray[np.bool_]) -> Floats:
    """The distance of two values of a block, with a sign: the scale divided by 2^(w - 1), exactly."""
    size = (scale << SCALE_SHIFT).astype(np.uint32).view(np.float32)
    step: Floats = np.ldexp(np.where(flipped, -size, size), 1 - width).astype(np.float32)
    return step
