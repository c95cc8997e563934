"""Correctly rounded sums (codec ``exact:rounded=true``): digits of integers whose lowest bit is the block's lowest."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from dtcomm.kernels.reference.floats import INFINITY, Bytes, Floats, magnitude
from dtcomm.kernels.reference.reproducible import NAN_BLOCK, Codes

LOWEST = -149  # the position of the last bit of the smallest fp32 number
NARROW, MIDDLE, WIDE = range(3)


class Digits(NamedTuple):
    """The digits of a tensor's elements: ``first`` of all, ``middle`` and ``wide`` of the blocks that need them."""

    first: Codes  # int32
    middle: Codes  # int16, for each block of class MIDDLE its elements
    wide: (
        Codes  # int32, for each block of class WIDE its elements' second digits, then their third digits, ...
    )


def measure(block: int, x: Floats, finite_only: bool) -> tuple[Bytes, Bytes]:
    """For each block its exponent, and a byte for a bound of the position of its lowest bit, larger for lower bits.

    No element has a bit below the last one of the smallest, nor in the zeros at the end of all of them.
    """
    bits = magnitude(np.pad(x, (0, -len(x) % block)).reshape(-1, block))
    bits = np.where(bits < INFINITY, bits, 0) if finite_only else bits
    top = bits.max(axis=1)
    tops = np.where(top >= INFINITY, NAN_BLOCK, np.where((top > 0) & (top >> 23 == 0), 1, top >> 23))
    smallest = np.where(bits > 0, bits, 2**31).min(axis=1)
    fractions = np.bitwise_or.reduce(bits & 0x7FFFFF, axis=1).astype(np.int64)
    zeros = np.where(fractions > 0, np.frexp((fractions & -fractions).astype(np.float64))[1] - 1, 23)
    lowest = np.maximum(smallest >> 23, 1).astype(np.int64) - 1 + zeros
    return tops.astype(np.uint8), np.where(bits.any(axis=1), 255 - lowest // 2, 0).astype(np.uint8)


def position_of(low: int) -> int:
    """The position of a block's lowest bit, or one below it."""
    return (255 - low) * 2 + LOWEST if low else 0


def class_of(ranks: int, top: int, low: int) -> int:
    """How many digits the elements of a block have."""
    span = top - 126 - position_of(low) if low else 0
    first, second = digit_bits(ranks)
    if span <= first:
        return NARROW
    return MIDDLE if second > 0 and span <= first + second else WIDE


def digit_bits(ranks: int) -> tuple[int, int]:
    """The bits of a digit of 32 and of 16 bits, without those that are left free for the sum."""
    room = (ranks - 1).bit_length()
    return 31 - room, 15 - room


def split(block: int, ranks: int, wide: int, tops: Bytes, lows: Bytes, x: Floats) -> Digits:
    """The digits of the finite elements of ``x``; elements that are not finite are zeros."""
    bits, _ = digit_bits(ranks)
    first = np.zeros(len(x), np.int32)
    middle: list[int] = []
    above: list[int] = []
    for at, count, kind, position in _blocks(block, ranks, len(x), tops, lows):
        rows = np.zeros((1 + wide if kind == WIDE else 2, block), np.int64)
        for i in range(count):
            value = float(x[at + i])
            if np.isfinite(value):
                units = int(Fraction(value) / Fraction(2) ** position)
                for k in range(len(rows)):
                    rows[k, i] = (-1 if units < 0 else 1) * (abs(units) >> k * bits & (1 << bits) - 1)
        first[at : at + count] = rows[0, :count]
        if kind == MIDDLE:
            middle += rows[1].tolist()
        elif kind == WIDE:
            above += rows[1:].flatten().tolist()
    return Digits(first, np.array(middle, np.int16), np.array(above, np.int32))


def rounded(
    block: int, ranks: int, wide: int, tops: Bytes, lows: Bytes, digits: Digits, divisor: int, narrower: bool
) -> Floats:
    """The value of the digits' sums, divided, rounded once to fp32.

    With ``narrower``, for types with fewer bits, it is rounded to odd: rounding that again is rounding once.
    """
    bits, _ = digit_bits(ranks)
    out = np.zeros(len(digits.first), np.float32)
    middle, above = iter(digits.middle.tolist()), iter(digits.wide.tolist())
    for at, count, kind, position in _blocks(block, ranks, len(out), tops, lows):
        rows = [digits.first[at : at + count].tolist() + [0] * (block - count)]
        rows += [[next(middle) for _ in range(block)]] if kind == MIDDLE else []
        rows += [[next(above) for _ in range(block)] for _ in range(wide)] if kind == WIDE else []
        for i in range(count):
            units = sum(row[i] << k * bits for k, row in enumerate(rows))
            value = Fraction(units) * Fraction(2) ** position / divisor
            out[at + i] = _to_odd(value) if narrower else _to_nearest(value)
    return out


def _to_nearest(value: Fraction) -> np.float32:
    """The fp32 number nearest to ``value``, ties to even."""
    size = abs(value)
    if not size:
        return np.float32(0)
    exponent = max(_exponent(size), -126) - 23
    units = round(size / Fraction(2) ** exponent)
    result = float(units) * 2.0**exponent
    return np.float32(np.inf if result >= 2.0**128 else result) * np.float32(1 if value > 0 else -1)


def _to_odd(value: Fraction) -> np.float32:
    """The fp32 number that equals ``value``, or else of its two neighbours the one whose last bit is set."""
    size = abs(value)
    if not size:
        return np.float32(0)
    exponent = max(_exponent(size), -126) - 23
    units = size / Fraction(2) ** exponent
    whole = int(units) | (units.denominator != 1)
    result = float(whole) * 2.0**exponent
    largest = float(np.finfo(np.float32).max)  # its last bit is set
    return np.float32(min(result, largest)) * np.float32(1 if value > 0 else -1)


def _exponent(size: Fraction) -> int:
    """The largest e with 2^e at most ``size``."""
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if Fraction(2) ** guess <= size else guess - 1


def _blocks(
    block: int, ranks: int, numel: int, tops: Bytes, lows: Bytes
) -> Iterator[tuple[int, int, int, int]]:
    """For each block where it starts, its elements, its class and the position of its lowest bit."""
    for b, (top, low) in enumerate(zip(tops.tolist(), lows.tolist(), strict=True)):
        at = b * block
        yield at, min(block, numel - at), class_of(ranks, top, low), position_of(low)
