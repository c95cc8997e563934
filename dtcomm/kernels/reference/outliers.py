"""Option spikes=1: the smallest and the largest element of each block, stored apart from the codes."""

from __future__ import annotations

import numpy as np

from dtcomm.codecs import Integer
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference.floats import INFINITY, NAN, Bytes, Floats, canonical, magnitude
from dtcomm.kernels.reference.scales import load_fields, rows_of, store_fields


def take(codec: Integer, x: Floats, key: int, index: int) -> tuple[Floats, Bytes]:
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


def put_back(codec: Integer, x: Floats, granule: Bytes) -> Floats:
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
