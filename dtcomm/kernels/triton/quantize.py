"""Device functions that turn blocks of floats into scales and codes, and back: int8, int4 and fp8_e4m3.

Tiles have one row per block; values per block are columns. `RULES` are the constants of a codec (codec_constants.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dtcomm.kernels.triton.floats import INFINITY, NAN, SMALLEST, bits_of, float_of, uniform

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even
ROUND_BITS = tl.constexpr(0x4B400000)
E4M3_NORMAL = tl.constexpr(121 << 23)  # bits of 2^-6, the smallest normal number


@triton.jit
def scale_bits(top, bad, RULES: tl.constexpr):
    """The bits of top / levels in the scale's type: 0 for zero blocks, NaN if `bad`. `top`: the largest magnitude."""
    bits = bits_of(tl.div_rn(float_of(top), tl.full(top.shape, RULES.levels, tl.float32)))
    if RULES.narrow:
        if RULES.up:
            bits = (bits + 0xFFFF) & -0x10000
        else:
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    bits = tl.minimum(bits, RULES.cap)
    bits = tl.where(bits < SMALLEST, 0, bits)
    return tl.where(bad, NAN, bits)


@triton.jit
def inverse(scale):
    """The factors that turn elements into codes, from the bits of scales: 0 for zero blocks and NaN blocks."""
    usable = (scale > 0) & (scale < INFINITY)
    by = float_of(tl.where(usable, scale, 0x3F800000))
    return tl.where(usable, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), by), 0.0)


@triton.jit
def zero_point(lowest, RULES: tl.constexpr):
    """`lowest` rounded towards -Inf to the scale's type, but never to -Inf; -0 becomes +0."""
    bits = bits_of(lowest)
    if RULES.narrow:
        cut = bits & -0x10000
        away = (bits != cut) & (bits < 0) & (cut != -0x810000)  # 0xff7f0000: the largest negative number
        bits = tl.where(away, cut + 0x10000, cut)
    return float_of(tl.where(bits == -0x80000000, 0, bits))


@triton.jit
def encode_code(t, key_low, key_high, start, i, RULES: tl.constexpr):
    """The int32 codes of elements over their scale; `start` + i are their indices in the caller's tensor."""
    if RULES.float8:
        size = tl.minimum(float_of(bits_of(t) & 0x7FFFFFFF), RULES.levels)
        # The exponent of the element's binade. Subnormal numbers have the unit of the smallest normal binade.
        exponent = tl.maximum(bits_of(size) & INFINITY, E4M3_NORMAL)
        if RULES.stochastic:
            # Over the unit, a power of two: exact.
            units = size * float_of((121 << 23) + ((136 << 23) - exponent))
            floor = units.to(tl.int32)
            floor += (uniform(key_low, key_high, start, i) < units - floor.to(tl.float32)).to(tl.int32)
        else:
            # A number whose last place is the unit: adding it rounds, and the sum's last bits count the units.
            large = exponent + (20 << 23)
            floor = bits_of(size + float_of(large)) - large
        codes = (floor + ((exponent - E4M3_NORMAL) >> 20)) | ((bits_of(t) >> 24) & 0x80)
    else:
        LOWEST: tl.constexpr = -RULES.levels if RULES.symmetric else 0.0
        t = tl.minimum(tl.maximum(t, LOWEST), RULES.levels)
        if RULES.stochastic:
            cut = t.to(tl.int32)
            codes = cut - (cut.to(tl.float32) > t).to(tl.int32)
            codes += (uniform(key_low, key_high, start, i) < t - codes.to(tl.float32)).to(tl.int32)
        else:
            codes = bits_of(t + ROUND) - ROUND_BITS
    return codes


@triton.jit
def decode_code(codes, RULES: tl.constexpr):
    """The values of codes (int32), before the scale."""
    if RULES.float8:
        size = codes & 0x7F
        normal = (size << 20) + (E4M3_NORMAL - (1 << 23))
        bits = tl.where(size < 8, bits_of(size.to(tl.float32) * 0.001953125), normal)
        bits = tl.where(size == 0x7F, NAN, bits)
        values = float_of(bits | ((codes & 0x80) << 24))
    else:
        values = codes.to(tl.float32)
    return values
