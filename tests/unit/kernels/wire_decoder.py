"""A decoder written from docs/reference/wire-format.md alone, to prove that the text suffices: plain Python and struct.

It knows nothing of dtcomm; a codec is the sixteen bytes of the document's last section. Numbers are Python floats,
rounded to fp32 after every operation (a double holds the exact product, and rounding twice is harmless for a sum).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

NAN = 0x7FC00000
CASTS, INTEGER, FLOAT8, MX, SIGN, TOPK, RANDK, EXACT, NVFP4, INTV = (0, 1, 2), 3, 4, 5, 6, 7, 8, 9, 10, 11
E4M3, E5M2, E2M1, BF16, FP16, FP32, NESTED, E3M4 = 1, 2, 3, 4, 5, 6, 7, 8
MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Codec:
    """`The codec as sixteen bytes`."""

    family: int
    bits: int
    scale: int
    symmetric: int
    stochastic: int
    rotate: int
    spikes: int
    element: int
    block: int
    kept: int


def decode(sixteen: bytes, payload: bytes, numel: int) -> list[int]:
    """The fp32 elements of a payload, as their bits."""
    codec = Codec(*struct.unpack("<8B2I", sixteen))
    granule = 4096 if codec.family in (TOPK, RANDK, NVFP4, INTV) else max(1024, codec.block)
    out: list[int] = []
    at = 0
    while len(out) < numel:
        n = min(granule, numel - len(out))
        size = -(-_used(codec, n) // 16) * 16
        out += _granule(codec, payload[at : at + size], n)
        at += size
    if at != len(payload):
        raise ValueError(f"{numel} elements are {at} bytes, not {len(payload)}")
    return out


# --- numbers ------------------------------------------------------------------------------------------------------


def _bits(x: float) -> int:
    if x != x:
        return NAN
    try:
        (bits,) = struct.unpack("<I", struct.pack("<f", x))
    except OverflowError:  # beyond FLT_MAX, to nearest
        return 0xFF800000 if x < 0 else 0x7F800000
    return int(bits)


def _float(bits: int) -> float:
    (x,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(x)


def _f32(x: float) -> float:
    return _float(_bits(x))


def _half_bits(half: int) -> int:
    """An fp16 as the bits of an fp32."""
    sign, exponent, fraction = half >> 15, half >> 10 & 31, half & 1023
    if exponent == 31:
        return sign << 31 | 0x7F800000 | fraction << 13 | (0x400000 if fraction else 0)
    size = fraction * 2.0**-24 if exponent == 0 else (1024 + fraction) * 2.0 ** (exponent - 25)
    return _bits(-size if sign else size)


def _words(raw: bytes, size: int) -> list[int]:
    return [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]


def _bit_string(raw: bytes, unit: int, count: int) -> list[int]:
    """`count` numbers of `unit` bits, the lowest bit of the first byte first."""
    string = int.from_bytes(raw, "little")
    return [string >> i * unit & ((1 << unit) - 1) for i in range(count)]


# --- where the bytes lie ------------------------------------------------------------------------------------------


def _used(codec: Codec, n: int) -> int:
    """Bytes of a granule of n elements before its padding."""
    if codec.family in (TOPK, RANDK):
        kept = -(-codec.kept * n // 4096)
        head = 8 if codec.family == RANDK else 0
        return head + _value_bytes(codec, kept) + _position_bytes(codec, n, kept)
    block = max(1, codec.block)
    blocks = -(-n // block)
    own = 4 if codec.family == NVFP4 else 0
    return (
        blocks * (_field_bytes(codec) * _fields(codec) + _spike_bytes(codec))
        + -(-blocks * block * _code_bits(codec) // 8)
        + own
    )


def _field_bytes(codec: Codec) -> int:
    if codec.family in (MX, EXACT, NVFP4, INTV):
        return 1
    return 4 if codec.scale else 2


def _fields(codec: Codec) -> int:
    if codec.family in CASTS:
        return 0
    return 1 if codec.family != INTEGER or codec.symmetric else 2


def _spike_bytes(codec: Codec) -> int:
    return codec.spikes * 2 * (_field_bytes(codec) + (1 if codec.block <= 256 else 2))


def _code_bits(codec: Codec) -> int:
    if codec.family == MX:
        return 4 if codec.element == E2M1 else 8
    if codec.family in (INTEGER, EXACT, INTV):
        return codec.bits
    return {0: 32, 1: 16, 2: 16, FLOAT8: 8, SIGN: 1, NVFP4: 4}[codec.family]


# --- one granule --------------------------------------------------------------------------------------------------


def _granule(codec: Codec, raw: bytes, n: int) -> list[int]:
    if codec.family == 0:
        return _words(raw[: 4 * n], 4)
    if codec.family == 1:
        return [_half_bits(half) for half in _words(raw[: 2 * n], 2)]
    if codec.family == 2:
        return [half << 16 for half in _words(raw[: 2 * n], 2)]
    if codec.family in (TOPK, RANDK):
        return [_bits(x) for x in _sparse(codec, raw, n)]
    if codec.family == EXACT:
        return [_bits(x) for x in _integers(codec, raw, n)]
    if codec.family == INTV:
        return [_bits(x) for x in _variable(codec, raw, n)]
    return [_bits(x) for x in _dense(codec, raw, n)]


def _integers(codec: Codec, raw: bytes, n: int) -> list[float]:
    blocks = -(-n // codec.block)
    out = []
    for i in range(n):
        exponent = raw[i // codec.block]
        at = blocks + i * codec.bits // 8
        code = int.from_bytes(raw[at : at + codec.bits // 8], "little", signed=True)
        out.append(math.nan if exponent == 255 else code * 2.0 ** (exponent - 126 - (codec.bits - 1)))
    return out


def _variable(codec: Codec, raw: bytes, n: int) -> list[float]:
    blocks, per_granule = -(-n // codec.block), 4096 // codec.block
    budget = (len(raw) - blocks - 4) * 8 // codec.block
    (word,) = _words(raw[-4:], 4)
    level, base = word % 65536, word >> 16
    out: list[float] = []
    total = 0
    for b in range(blocks):
        field = raw[b] % 128
        width = min((field * per_granule + b + 64 * per_granule - level) // (8 * per_granule), 8)
        width = 0 if field in (0, 127) else max(width, 0)
        at = blocks + total * codec.block // 8
        total += width
        if field == 127 or (field != 0 and field + base >= 0x7F8):
            out += [math.nan] * codec.block
        elif width == 0 or total > budget:
            out += [0.0] * codec.block
        else:
            step = _float((field + base) << 20) * 2.0 ** (1 - width) * (-1 if raw[b] >= 128 else 1)
            codes = _planes(raw[at:], width, codec.block)
            out += [(q - (1 << width) if q >> (width - 1) else q) * step + 0.0 for q in codes]
    return out[:n]


def _dense(codec: Codec, raw: bytes, n: int) -> list[float]:
    blocks = -(-n // codec.block)
    count = blocks * codec.block
    field = _field_bytes(codec)
    scales = _fields_of(codec, raw[: blocks * field])
    at = blocks * field
    zeros = [0.0] * blocks
    if _fields(codec) == 2:
        zeros = _fields_of(codec, raw[at : at + blocks * field])
        at += blocks * field
    spikes_at = at
    at += blocks * _spike_bytes(codec)
    if codec.family == NVFP4:
        scales = [
            _nvfp4_scale(scale, _float(_words(raw[9 * blocks : 9 * blocks + 4], 4)[0])) for scale in scales
        ]
    values = _codes(codec, raw[at:], count)
    out = []
    for b in range(blocks):
        block = [
            _value(codec, code, scales[b], zeros[b])
            for code in values[b * codec.block : (b + 1) * codec.block]
        ]
        exists = codec.block if codec.rotate else min(codec.block, n - b * codec.block)
        if codec.spikes:
            _put_spikes(codec, raw[spikes_at:], b, blocks, block, exists)
        out += _rotate_back(block) if codec.rotate else block
    return out[:n]


def _fields_of(codec: Codec, raw: bytes) -> list[float]:
    if codec.family == MX:
        return [math.nan if byte == 255 else 2.0 ** (byte - 127) for byte in raw]
    if codec.family == NVFP4:
        return [_small_float(E4M3, byte) for byte in raw]
    return [_float(word if codec.scale else word << 16) for word in _words(raw, 4 if codec.scale else 2)]


def _nvfp4_scale(scale: float, own: float) -> float:
    product = _f32(scale * own)
    return product if math.isfinite(product) else math.nan


def _codes(codec: Codec, raw: bytes, count: int) -> list[int]:
    if codec.family != INTEGER:
        return _bit_string(raw, _code_bits(codec), count)
    return _planes(raw, codec.bits, count)


def _planes(raw: bytes, bits: int, count: int) -> list[int]:
    codes, at, low = [0] * count, 0, 0
    for unit in (8, 4, 2, 1):
        if bits & unit:
            size = count * unit // 8
            for i, part in enumerate(_bit_string(raw[at : at + size], unit, count)):
                codes[i] |= part << low
            at, low = at + size, low + unit
    return codes


def _value(codec: Codec, code: int, scale: float, zero: float) -> float:
    if codec.family == INTEGER:
        if not (math.isfinite(scale) and math.isfinite(zero)):
            return math.nan
        if codec.symmetric:
            return _f32((code - (1 << codec.bits) if code >> (codec.bits - 1) else code) * scale)
        return _f32(zero + _f32(code * scale))
    if codec.family == SIGN:
        return -scale if code else scale
    return _f32(_small_float(codec.element, code) * scale)


def _small_float(element: int, code: int) -> float:
    exponent_bits, mantissa_bits = {E4M3: (4, 3), E5M2: (5, 2), E2M1: (2, 1), E3M4: (3, 4)}[element]
    bias = (1 << (exponent_bits - 1)) - 1
    sign = code >> (exponent_bits + mantissa_bits)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = code & ((1 << mantissa_bits) - 1)
    if element in (E4M3, E3M4) and code & 0x7F == 0x7F:
        return math.nan
    if element == E5M2 and exponent == 31:
        return math.nan if fraction else -math.inf if sign else math.inf
    part = fraction / (1 << mantissa_bits)
    size = part * 2.0 ** (1 - bias) if exponent == 0 else (1 + part) * 2.0 ** (exponent - bias)
    return -size if sign else size


def _put_spikes(codec: Codec, raw: bytes, b: int, blocks: int, block: list[float], exists: int) -> None:
    field, place_bytes = _field_bytes(codec), 1 if codec.block <= 256 else 2
    values = _fields_of(codec, raw[: 2 * blocks * field])
    places = _words(raw[2 * blocks * field : 2 * blocks * (field + place_bytes)], place_bytes)
    for value, place in zip(values[2 * b : 2 * b + 2], places[2 * b : 2 * b + 2]):
        if place < exists:
            block[place] = value


def _mix(h: int) -> int:
    h ^= h >> 16
    h = h * 0x7FEB352D & MASK
    h ^= h >> 15
    h = h * 0x846CA68B & MASK
    return h ^ h >> 16


def _rotate_back(block: list[float]) -> list[float]:
    x = [_f32(value * _f32(1 / math.sqrt(len(block)))) for value in block]
    half = 1
    while half < len(x):
        for i in range(len(x)):
            if not i & half:
                x[i], x[i + half] = _f32(x[i] + x[i + half]), _f32(x[i] - x[i + half])
        half *= 2
    return [-value if _mix(8135563 + i) >> 31 else value for i, value in enumerate(x)]


# --- a sparse granule ---------------------------------------------------------------------------------------------


def _nested(codec: Codec) -> Codec:
    """The codec of a sparse codec's values."""
    fields = (codec.bits, codec.scale, codec.symmetric, codec.stochastic, codec.rotate, codec.spikes)
    if codec.element == NESTED:
        return Codec(INTEGER, *fields, 0, codec.block, 0)
    return Codec({BF16: 2, FP16: 1, FP32: 0}[codec.element], 0, 0, 1, 0, 0, 0, 0, 0, 0)


def _value_bytes(codec: Codec, kept: int) -> int:
    """Of a payload of the values' codec, without its last padding."""
    nested, whole = _nested(codec), (kept - 1) // 1024
    return whole * (-(-_used(nested, 1024) // 16) * 16) + _used(nested, kept - whole * 1024)


def _position_bytes(codec: Codec, n: int, kept: int) -> int:
    if codec.family == RANDK:
        return 0
    return -(-(n if codec.kept * 12 > 4096 else kept * 12) // 8)


def _sparse(codec: Codec, raw: bytes, n: int) -> list[float]:
    kept = -(-codec.kept * n // 4096)
    head = 8 if codec.family == RANDK else 0
    end = head + _value_bytes(codec, kept)
    values = _values(_nested(codec), raw[head:end], kept)
    if codec.family == RANDK:
        if values[0] != values[0]:
            return [math.nan] * n
        places = _random_places(int.from_bytes(raw[:8], "little"), n, kept)
    elif codec.kept * 12 > 4096:
        places = [i for i, bit in enumerate(_bit_string(raw[end:], 1, n)) if bit]
    else:
        places = _bit_string(raw[end:], 12, kept)
    out = [0.0] * n
    for place, value in zip(places, values):
        if place < n:
            out[place] = value
    return out


def _values(nested: Codec, raw: bytes, kept: int) -> list[float]:
    out: list[float] = []
    at = 0
    while len(out) < kept:
        n = min(1024, kept - len(out))
        used = _used(nested, n)
        out += [_float(bits) for bits in _granule(nested, raw[at : at + used], n)]
        at += -(-used // 16) * 16
    return out


def _random_places(key: int, n: int, kept: int) -> list[int]:
    low, high = key & MASK, key >> 32
    words = [_mix((low + _mix((high + r) & MASK)) & MASK) for r in range(6)]
    m = 0
    while 1 << m < n:
        m += 1
    fold = max(1, -(-m // 2))

    def bijection(a: int) -> int:
        for word in words[:5]:
            a = (a * (word & 0xFFFF | 1) + (word >> 16)) % (1 << m)
            a ^= a >> fold
        return a

    places = []
    for j in range(kept):
        a = bijection(j)
        while a >= n:
            a = bijection(a)
        places.append((a + (words[5] * n >> 32)) % n)
    return places
