"""Device functions on fp32 and its bits: widening, narrowing, the canonical NaN, the random numbers of rounding.

Magnitudes are int32 with the sign cleared, so that they compare as docs/reference/wire-format.md orders them.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
SMALLEST = tl.constexpr(0x00800000)  # the smallest normal number


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    return bits_of(x) & 0x7FFFFFFF


@triton.jit
def canonical(x):
    """`x` with every NaN replaced by the canonical one."""
    return float_of(tl.where(magnitude(x) > INFINITY, NAN, bits_of(x)))


@triton.jit
def widen(x):
    """fp32, fp16 or bf16 as fp32. The bits of a NaN are kept, as in a widening by integer operations."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        half = x.to(tl.uint16, bitcast=True).to(tl.int32)
        size = half & 0x7FFF
        nan = ((half & 0x8000) << 16) | ((size << 13) + (224 << 23)) | 0x400000
        x = float_of(tl.where(size > 0x7C00, nan, bits_of(x.to(tl.float32))))
    return x


@triton.jit
def narrow(x, type: tl.constexpr):
    """fp32 cast to `type`: to nearest, ties to even, subnormals kept; every NaN becomes the canonical one."""
    if type == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(magnitude(x) > INFINITY, 0x7FC0, half)
        x = half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif type == tl.float16:
        half = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        half = tl.where(magnitude(x) > INFINITY, 0x7E00, half)
        x = half.to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        x = canonical(x)
    return x


@triton.jit
def narrow_at_random(x, random):
    """fp32 cast to bf16 with stochastic rounding; `random` is what :func:`uniform` returns."""
    step = (random * 65536.0).to(tl.int32).to(tl.uint32)
    half = (x.to(tl.uint32, bitcast=True) + step) >> 16
    half = tl.where(magnitude(x) > INFINITY, 0x7FC0, half)
    return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _mix(h):
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    return h


@triton.jit
def uniform(key_low, key_high, start, i):
    """The random numbers of the elements `start` + i, as in csrc/codec/counter_rng.h: multiples of 2^-24 in [0, 1).

    `start`: uint64, index of the tile's first element in the caller's tensor; a tile lies in two pages of 2^32
    indices at most.
    """
    between = _mix(key_high + _mix(key_low + 0x85EBCA6B))
    page = (start >> 32).to(tl.uint32)
    before = _mix(key_low + _mix(key_high + _mix(page + 0x9E3779B9)))
    after = _mix(key_low + _mix(key_high + _mix(page + 1 + 0x9E3779B9)))
    first = start.to(tl.uint32)
    low = first + i.to(tl.uint32)
    h = low ^ tl.where(low < first, after, before)
    h ^= h >> 16
    h *= 0x7FEB352D
    h += between
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    return (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
