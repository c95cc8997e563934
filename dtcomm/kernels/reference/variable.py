"""Codec intv: integer codes whose width follows from the scale of their block and from a level of the granule."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtcomm.codecs.variable import VARIABLE_GRANULE, VariableInteger
from dtcomm.kernels.reference.floats import INFINITY, NAN, Bytes, Floats, canonical, magnitude, rows_of
from dtcomm.kernels.reference.integer import pack_codes, unpack_codes

# Of a block's byte: the sign of its step, and the fields of zero blocks and NaN blocks.
FLIPPED, ZERO, NAN_FIELD = 128, 0, 127
SCALE_SHIFT, MANTISSA_BITS = 20, 3  # of the scale in the bits of an fp32
SMALLEST_SCALE, LARGEST_SCALE, SCALE_OF_INFINITY = 0x48, 0x7F7, 0x7F8
WIDEST = 8
WORD_BYTES, LEVEL_BITS = 4, 16  # what a granule has once: its level and, above it, its base

Numbers = npt.NDArray[np.int64]


def encode(codec: VariableInteger, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule; its padding holds codes."""
    rows = rows_of(x, codec.block)
    top = magnitude(rows).max(axis=1).astype(np.int64)
    bad = top >= int(INFINITY)
    scale = np.minimum(top + (1 << SCALE_SHIFT) - 1 >> SCALE_SHIFT, LARGEST_SCALE)
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


def decode(codec: VariableInteger, granule: Bytes, n: int) -> Floats:
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
