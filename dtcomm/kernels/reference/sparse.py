"""Sparse codecs: a part of a granule's elements, and where they were.

A payload that no encoder made decodes to what it says within the granule: positions outside are left out, of a
position that is repeated the last value stays, set bits without a value and values without a set bit count nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dtcomm.codecs import Bf16, Codec, Fp16, Integer, RandK, TopK
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference import integer
from dtcomm.kernels.reference.floats import INFINITY, NAN, Bytes, Floats, canonical, magnitude, narrow, widen

Places = npt.NDArray[np.int64]
VALUE_GRANULE = 1024  # of the values' own payload
ROUNDS = 5
_M32, _M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def encode_topk(codec: TopK, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding."""
    layout = codec.layout()
    order = np.argsort(-magnitude(x).astype(np.int64), kind="stable")  # of equals the first comes first
    places = np.sort(order[: layout.kept_of(len(x))])
    values = _encode_values(codec.value_codec(), canonical(x[places]), key, index)
    if layout.position_bits == 1:
        sent = np.zeros(len(x), np.uint8)
        sent[places] = 1
        return np.concatenate([values, np.packbits(sent, bitorder="little")])
    bits = places[:, None] >> np.arange(layout.position_bits) & 1
    return np.concatenate([values, np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")])


def decode_topk(codec: TopK, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
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


def encode_randk(codec: RandK, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding."""
    n, kept = len(x), codec.layout().kept_of(len(x))
    granule_key = counter_rng.absorb(key, counter_rng.GOLDEN_RATIO, index)
    values = x[positions(granule_key, n, kept)]
    if not feedback:
        values = values * (np.float32(n) / np.float32(kept))
    if (magnitude(x) >= INFINITY).any():
        values = np.full(kept, NAN)
    head = np.frombuffer(granule_key.to_bytes(8, "little"), np.uint8)
    return np.concatenate([head, _encode_values(codec.value_codec(), values, key, index)])


def decode_randk(codec: RandK, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    layout = codec.layout()
    kept, start = layout.kept_of(n), layout.head
    values = _decode_values(codec.value_codec(), granule[start : start + layout.values(n)], kept)
    if np.isnan(values[0]):
        return np.full(n, NAN)
    return _scatter(n, positions(int.from_bytes(granule[:start].tobytes(), "little"), n, kept), values)


def positions(granule_key: int, n: int, kept: int) -> Places:
    """The first `kept` outputs of the granule's permutation of [0, n)."""
    low, high = granule_key & _M32, granule_key >> 32
    words = [
        counter_rng.mix32((low + counter_rng.mix32((high + j) & _M32)) & _M32) for j in range(ROUNDS + 1)
    ]
    bits = (n - 1).bit_length()
    fold = max((bits + 1) // 2, 1)

    def bijection(places: Places) -> Places:
        for word in words[:ROUNDS]:
            places = places * (word & 0xFFFF | 1) + (word >> 16) & (1 << bits) - 1
            places = places ^ places >> fold
        return places

    places = bijection(np.arange(kept))
    while (outside := places >= n).any():
        places[outside] = bijection(places[outside])
    turned: Places = (places + (words[ROUNDS] * n >> 32)) % n
    return turned


def _scatter(n: int, places: Places, values: Floats) -> Floats:
    out = np.zeros(n, np.float32)
    for place, value in zip(places.tolist(), canonical(values), strict=False):
        if place < n:
            out[place] = value
    return out


def _encode_values(codec: Codec, values: Floats, key: int, index: int) -> Bytes:
    """A payload without its last padding; the random numbers are those of the elements from `index` on."""
    if not isinstance(codec, Integer):
        return narrow(_type(codec), np.ascontiguousarray(values))
    parts = []
    for start in range(0, len(values), VALUE_GRANULE):
        part = integer.encode(codec, values[start : start + VALUE_GRANULE], key, index + start, False)
        parts += [part, np.zeros(-len(part) % 16, np.uint8)]
    return np.concatenate(parts[:-1])


def _decode_values(codec: Codec, raw: Bytes, count: int) -> Floats:
    raw = np.ascontiguousarray(raw)
    if not isinstance(codec, Integer):
        return widen(_type(codec), raw)[:count]
    layout, parts, at = codec.layout(), [], 0
    for start in range(0, count, VALUE_GRANULE):
        n = min(VALUE_GRANULE, count - start)
        parts.append(integer.decode(codec, raw[at : at + layout.used(n)], n))
        at += layout.bytes(n)
    return np.concatenate(parts)


def _type(codec: Codec) -> torch.dtype:
    if isinstance(codec, Fp16):
        return torch.float16
    return torch.bfloat16 if isinstance(codec, Bf16) else torch.float32
