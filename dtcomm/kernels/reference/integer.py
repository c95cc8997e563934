"""Codecs int8 to int2: integer codes with a scale per block."""

from __future__ import annotations

import itertools

import numpy as np

from dtcomm.codecs import Integer
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference import outliers
from dtcomm.kernels.reference.floats import INFINITY, NAN, Bytes, Floats, canonical, magnitude
from dtcomm.kernels.reference.scales import (
    block_scale,
    inverse,
    load_fields,
    rows_of,
    store_fields,
    zero_point,
)


def encode(codec: Integer, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding."""
    apart = np.zeros(0, np.uint8)
    if codec.spikes:
        x, apart = outliers.take(codec, x, key, index)
    fields, codes = encode_blocks(codec, x, key, index)
    stored = [store_fields(field, codec.scale) for field in fields]
    return np.concatenate([*stored, apart, pack_codes(codes.reshape(-1), codec.bits)])


def decode(codec: Integer, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    layout = codec.layout()
    ends = [layout.blocks(n) * layout.field_bytes * i for i in range(layout.fields + 1)]
    fields = [load_fields(granule[i:j], codec.scale) for i, j in itertools.pairwise(ends)]
    bad = ~np.isfinite(fields).all(axis=0)
    fields = [np.where(bad, NAN, field) for field in fields]
    codes = unpack_codes(granule[layout.codes_at(n) : layout.used(n)], codec.bits)
    x = canonical(decode_blocks(codec, fields, codes.reshape(-1, layout.block)).reshape(-1)[:n])
    return outliers.put_back(codec, x, granule) if codec.spikes else x


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
