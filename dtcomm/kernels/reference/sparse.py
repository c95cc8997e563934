"""Sparse codecs, topk and randk: some elements of a granule, and their positions.

`gather`, `scatter` and `restore_residual` are the local tasks of randk with shared positions: all ranks draw the same
positions and sum only the values.

Payloads that no encoder writes still decode within the granule: positions outside it are ignored, the last value of a
repeated position stays, and set bits without a value or values without a set bit are ignored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dtcomm.codecs import Codec, Integer, RandK, TopK
from dtcomm.codecs.base import VALUE_GRANULE
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference import integer
from dtcomm.kernels.reference.floats import INFINITY, NAN, Bytes, Floats, canonical, magnitude, narrow, widen

Positions = npt.NDArray[np.int64]
ROUNDS = 5
_M32, _M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def encode(codec: TopK | RandK, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding."""
    if isinstance(codec, TopK):
        return _encode_topk(codec, x, key, index)
    return _encode_randk(codec, x, key, index, feedback)


def decode(codec: TopK | RandK, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    return _decode_topk(codec, granule, n) if isinstance(codec, TopK) else _decode_randk(codec, granule, n)


def _encode_topk(codec: TopK, x: Floats, key: int, index: int) -> Bytes:
    layout = codec.layout()
    order = np.argsort(
        -magnitude(x).astype(np.int64), kind="stable"
    )  # of equal elements the first comes first
    places = np.sort(order[: layout.kept_of(len(x))])
    values = _encode_values(codec.value_codec(), canonical(x[places]), key, index)
    if layout.position_bits == 1:
        sent = np.zeros(len(x), np.uint8)
        sent[places] = 1
        return np.concatenate([values, np.packbits(sent, bitorder="little")])
    bits = places[:, None] >> np.arange(layout.position_bits) & 1
    return np.concatenate([values, np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")])


def encode_whole(codec: TopK, x: Floats) -> Bytes:
    """The payload of a tensor with ``scope=tensor``, without its padding."""
    order = np.argsort(-magnitude(x).astype(np.int64), kind="stable")
    places = np.sort(order[: max(1, round(codec.ratio * len(x)))])
    values = _encode_values(codec.value_codec(), canonical(x[places]), 0, 0)
    return np.concatenate([places.astype("<i4").view(np.uint8), values])


def _decode_topk(codec: TopK, granule: Bytes, n: int) -> Floats:
    layout = codec.layout()
    ends = layout.values(n), layout.values(n) + layout.positions(n)
    values = _decode_values(codec.value_codec(), granule[: ends[0]], layout.kept_of(n))
    bits = np.unpackbits(granule[slice(*ends)], bitorder="little").astype(np.int64)
    if layout.position_bits == 1:
        places = np.flatnonzero(bits[:n])[: len(values)]
    else:
        rows = bits[: len(values) * layout.position_bits].reshape(len(values), layout.position_bits)
        places = rows @ (1 << np.arange(layout.position_bits))
    return _scatter(n, places, values)


def _encode_randk(codec: RandK, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    n, kept = len(x), codec.layout().kept_of(len(x))
    granule_key = counter_rng.absorb(key, counter_rng.GOLDEN_RATIO, index)
    values = x[positions(granule_key, n, kept)]
    if not feedback:
        values = values * (np.float32(n) / np.float32(kept))
    if (magnitude(x) >= INFINITY).any():
        values = np.full(kept, NAN)
    head = np.frombuffer(granule_key.to_bytes(8, "little"), np.uint8)
    return np.concatenate([head, _encode_values(codec.value_codec(), values, key, index)])


def _decode_randk(codec: RandK, granule: Bytes, n: int) -> Floats:
    layout = codec.layout()
    kept, start = layout.kept_of(n), layout.head
    values = _decode_values(codec.value_codec(), granule[start : start + layout.values(n)], kept)
    if np.isnan(values[0]):
        return np.full(n, NAN)
    return _scatter(n, positions(int.from_bytes(granule[:start].tobytes(), "little"), n, kept), values)


def positions(granule_key: int, n: int, kept: int) -> Positions:
    """The first `kept` outputs of the permutation of [0, n) that the granule's key selects."""
    low, high = granule_key & _M32, granule_key >> 32
    words = [
        counter_rng.mix32((low + counter_rng.mix32((high + j) & _M32)) & _M32) for j in range(ROUNDS + 1)
    ]
    bits = (n - 1).bit_length()
    fold = max((bits + 1) // 2, 1)

    def bijection(places: Positions) -> Positions:
        for word in words[:ROUNDS]:
            places = places * (word & 0xFFFF | 1) + (word >> 16) & (1 << bits) - 1
            places = places ^ places >> fold
        return places

    places = bijection(np.arange(kept))
    while (outside := places >= n).any():
        places[outside] = bijection(places[outside])
    rotated: Positions = (places + (words[ROUNDS] * n >> 32)) % n
    return rotated


def _scatter(n: int, places: Positions, values: Floats) -> Floats:
    out = np.zeros(n, np.float32)
    for place, value in zip(places.tolist(), canonical(values), strict=False):
        if place < n:
            out[place] = value
    return out


def _encode_values(codec: Codec, values: Floats, key: int, index: int) -> Bytes:
    """The payload of the values without its last padding; `index` is the counter of the first random number."""
    wire_dtype = codec.wire_dtype(torch.float32)
    if wire_dtype is not None:
        return narrow(wire_dtype, np.ascontiguousarray(values))
    assert isinstance(codec, Integer)
    parts = []
    for start in range(0, len(values), VALUE_GRANULE):
        part = integer.encode_integer(codec, values[start : start + VALUE_GRANULE], key, index + start)
        parts += [part, np.zeros(-len(part) % 16, np.uint8)]
    return np.concatenate(parts[:-1])


def _decode_values(codec: Codec, raw: Bytes, count: int) -> Floats:
    raw = np.ascontiguousarray(raw)
    wire_dtype = codec.wire_dtype(torch.float32)
    if wire_dtype is not None:
        return widen(wire_dtype, raw)[:count]
    assert isinstance(codec, Integer)
    layout, parts, at = codec.layout(), [], 0
    for start in range(0, count, VALUE_GRANULE):
        n = min(VALUE_GRANULE, count - start)
        parts.append(integer.decode_integer(codec, raw[at : at + layout.used(n)], n))
        at += layout.bytes(n)
    return np.concatenate(parts)
