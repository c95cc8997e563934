"""Codec exact and its local tasks: integers with one power of two per block, common to all terms of a sum."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dtcomm.codecs import Exact
from dtcomm.kernels.reference.floats import INFINITY, NAN, Bytes, Floats, magnitude

Codes: TypeAlias = npt.NDArray[Any]  # int16 or int32

NAN_BLOCK = 255
_TYPES = {16: np.int16, 32: np.int32}


def encode(codec: Exact, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding: the exponents of these floats alone, with no room for other ranks."""
    exponents = measure(codec, x)
    codes = to_codes(codec, 1, x, exponents)
    rest = np.zeros(-len(x) % codec.block, codes.dtype)
    return np.concatenate([exponents, np.concatenate([codes, rest]).view(np.uint8)])


def decode(codec: Exact, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    layout = codec.layout()
    codes = np.ascontiguousarray(granule[layout.codes_at(n) : layout.used(n)]).view(_TYPES[codec.bits])[:n]
    return from_codes(codec, 1, codes, granule[: layout.blocks(n)])


def measure(codec: Exact, x: Floats) -> Bytes:
    """The exponent of each block: its largest element is below 2^(exponent - 126)."""
    rows = np.pad(x, (0, -len(x) % codec.block)).reshape(-1, codec.block)
    top = magnitude(rows).max(axis=1)
    exponents = np.where((top > 0) & (top >> 23 == 0), 1, top >> 23)
    return np.where(top >= INFINITY, NAN_BLOCK, exponents).astype(np.uint8)


def to_codes(codec: Exact, ranks: int, x: Floats, exponents: Bytes) -> Codes:
    """Every element in units of its block, rounded to an integer that leaves room for the other ranks."""
    digits = codec.digits(ranks)
    most = 2.0**digits - 1
    t = np.clip(x.astype(np.float64) / _units(codec, digits, exponents, len(x)), -most, most)
    return np.where(_bad(codec, exponents, len(x)), 0, np.rint(t)).astype(_TYPES[codec.bits])


def from_codes(codec: Exact, ranks: int, codes: Codes, exponents: Bytes, divisor: int = 1) -> Floats:
    """The values of the integers, divided, rounded to fp32."""
    values = codes.astype(np.float64) * _units(codec, codec.digits(ranks), exponents, len(codes))
    return np.where(_bad(codec, exponents, len(codes)), NAN, (values / divisor).astype(np.float32))


def _units(codec: Exact, digits: int, exponents: Bytes, n: int) -> npt.NDArray[np.float64]:
    """The unit of each of `n` elements."""
    return np.repeat(np.ldexp(1.0, exponents.astype(np.int64) - 126 - digits), codec.block)[:n]


def _bad(codec: Exact, exponents: Bytes, n: int) -> npt.NDArray[np.bool_]:
    return np.repeat(exponents == NAN_BLOCK, codec.block)[:n]
