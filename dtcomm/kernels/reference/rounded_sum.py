"""Correctly rounded sums (codec ``exact:rounded=true``): digits of integers whose lowest bit is the block's lowest."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from dtcomm.kernels.reference.floats import INFINITY, Bytes, Floats, magnitude
from dtcomm.kernels.reference.reproducible import NAN_BLOCK, Codes

LOWEST = -149  # the position of the last bit of the smallest fp32 number
BLOCK, HALF = 32, 16  # elements that share a range of bits


def measure(x: Floats, finite_only: bool) -> tuple[Bytes, Bytes]:
    """For each block its exponent, and a byte for a bound of the position of its lowest bit, larger for lower bits.

    No element has a bit below the last one of the smallest, nor in the zeros at the end of all of them.
    """
    bits = magnitude(np.pad(x, (0, -len(x) % BLOCK)).reshape(-1, BLOCK))
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


def digit_bits(ranks: int) -> tuple[int, int]:
    """The bits of a digit of 32 and of 16 bits, without those that are left free for the sum."""
    room = (ranks - 1).bit_length()
    return 31 - room, 15 - room


def split(ranks: int, tops: Bytes, lows: Bytes, x: Floats) -> Codes:
    """The digits of the finite elements of ``x``, block by block; elements that are not finite are zeros.

    A block has a row of 32-bit digits after the other, lowest first. If a 16-bit digit suffices above them, half a row
    follows: element i in the low half of its word i, element i + 16 in the high half, as low + high * 2^16.
    """
    bits, _ = digit_bits(ranks)
    digits: list[int] = []
    for at, count, whole, half, position in _blocks(ranks, len(x), tops, lows):
        rows = np.zeros((whole + half, BLOCK), np.int64)
        for i in range(count):
            value = float(x[at + i])
            if np.isfinite(value):
                units = int(Fraction(value) / Fraction(2) ** position)
                for k in range(len(rows)):
                    rows[k, i] = (-1 if units < 0 else 1) * (abs(units) >> k * bits & (1 << bits) - 1)
        digits += rows[:whole].flatten().tolist()
        if half:
            digits += (rows[whole, :HALF] + (rows[whole, HALF:] << 16)).tolist()
    return np.array(digits, np.int32)


def rounded(
    ranks: int, tops: Bytes, lows: Bytes, digits: Codes, numel: int, divisor: int, narrower: bool
) -> Floats:
    """The value of the digits' sums, divided, rounded once to fp32.

    With ``narrower``, for types with fewer bits, it is rounded to odd: rounding that again is rounding once.
    """
    bits, _ = digit_bits(ranks)
    out = np.zeros(numel, np.float32)
    for at, count, whole, half, position in _blocks(ranks, numel, tops, lows):
        rows = digits[: whole * BLOCK].astype(np.int64).reshape(whole, BLOCK)
        words, digits = digits[whole * BLOCK :][: half * HALF], digits[whole * BLOCK + half * HALF :]
        if half:
            low = words.astype(np.int16).astype(np.int64)
            rows = np.vstack([rows, np.concatenate([low, words - low >> 16])])
        for i in range(count):
            units = sum(int(row[i]) << k * bits for k, row in enumerate(rows))
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


def _blocks(ranks: int, numel: int, tops: Bytes, lows: Bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """For each block where it starts, its elements, its rows of 32-bit digits and of 16-bit ones, and its position."""
    first, second = digit_bits(ranks)
    for b, (top, low) in enumerate(zip(tops.tolist(), lows.tolist(), strict=True)):
        at, position = b * BLOCK, position_of(low)
        whole, rest = divmod(top - 126 - position if low else 0, first)
        half = 0 < rest <= second
        yield at, min(BLOCK, numel - at), whole + (rest > 0 and not half), int(half), position
