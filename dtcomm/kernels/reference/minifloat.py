"""Codecs of small floats: fp8 with a scale per block, mxfp8 and mxfp4 with a power of two per block, and nvfp4.

A :class:`Minifloat` has a table of all its numbers and rounds by looking up the neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dtcomm.codecs.minifloat import MX_BLOCK, NVFP4_BLOCK, Float8, Mx, Nvfp4
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference.floats import (
    INFINITY,
    NAN,
    Bytes,
    Floats,
    block_scale,
    canonical,
    inverse,
    load_fields,
    magnitude,
    rows_of,
    store_fields,
)

MX_BIAS = 127  # of a scale's exponent
MX_NAN = 255
E4M3_NAN = 0x7F
SMALLEST = np.finfo(np.float32).tiny  # the smallest normal number
NVFP4_CAP = np.uint32(0x79C30C30).view(np.float32)  # the largest scale of a granule: 6 * (448 * it) is finite


@dataclass(frozen=True, kw_only=True)
class Minifloat:
    """A format: a sign, `exponent` bits of an exponent biased by `bias`, and `mantissa` bits.

    Of the non-negative codes the first `numbers` are finite; then comes Inf, if `infinite`, then NaN.
    """

    exponent: int
    mantissa: int
    bias: int
    numbers: int
    infinite: bool = False

    @cached_property
    def sizes(self) -> Floats:
        """The finite numbers from 0 up; a number's index is its code."""
        codes = np.arange(self.numbers)
        exponents, mantissas = codes >> self.mantissa, codes & (1 << self.mantissa) - 1
        parts = mantissas / 2**self.mantissa + (exponents > 0)
        sizes: Floats = np.ldexp(parts, np.maximum(exponents, 1) - self.bias).astype(np.float32)
        return sizes

    @property
    def sign(self) -> int:
        """The code of -0."""
        return 1 << self.exponent + self.mantissa

    @cached_property
    def table(self) -> Floats:
        """The value of every code."""
        rest = np.full(self.sign - self.numbers, NAN)
        if self.infinite:
            rest[0] = np.inf
        positive = np.concatenate([self.sizes, rest]).astype(np.float32)
        return np.concatenate([positive, -positive])

    def _below(self, size: Floats) -> npt.NDArray[np.intp]:
        """The code of the largest number that is not above `size`, but not the last code."""
        return np.clip(np.searchsorted(self.sizes, size, side="right") - 1, 0, self.numbers - 2)

    def _signed(self, codes: npt.NDArray[np.intp], t: Floats) -> Bytes:
        signed: Bytes = (codes + np.signbit(t) * self.sign).astype(np.uint8)
        return signed

    def nearest(self, t: Floats) -> Bytes:
        """Codes of finite numbers: ties to the even code; numbers beyond the largest one become the largest one."""
        size = np.abs(t)
        below = self._below(size)
        half = (self.sizes[below] + self.sizes[below + 1]) / np.float32(2)
        up = (size > half) | ((size == half) & (below % 2 == 1))
        return self._signed(below + up, t)

    def stochastic(self, t: Floats, random: Floats) -> Bytes:
        """Codes of finite numbers, rounded stochastically.

        A number is rounded away from zero if `random`, in [0, 1), is below its distance from the neighbour nearer to
        zero as a part of the gap. Numbers beyond the largest one become the largest one.
        """
        size = np.minimum(np.abs(t), self.sizes[-1])
        below = self._below(size)
        low, high = self.sizes[below], self.sizes[below + 1]
        up = random < (size - low) / (high - low)
        return self._signed(below + up, t)


FORMATS = {
    "e4m3": Minifloat(exponent=4, mantissa=3, bias=7, numbers=127),
    "e5m2": Minifloat(exponent=5, mantissa=2, bias=15, numbers=124, infinite=True),
    "e3m4": Minifloat(exponent=3, mantissa=4, bias=3, numbers=127),
    "e2m1": Minifloat(exponent=2, mantissa=1, bias=1, numbers=8),
}


def encode(codec: Float8 | Mx | Nvfp4, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding."""
    if isinstance(codec, Nvfp4):
        return _encode_nvfp4(x)
    return _encode_float8(codec, x, key, index) if isinstance(codec, Float8) else _encode_mx(codec, x)


def decode(codec: Float8 | Mx | Nvfp4, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    if isinstance(codec, Nvfp4):
        return _decode_nvfp4(codec, granule, n)
    if isinstance(codec, Float8):
        return _decode_float8(codec, granule, n)
    return _decode_mx(codec, granule, n)


def _encode_float8(codec: Float8, x: Floats, key: int, index: int) -> Bytes:
    form, rows = FORMATS[codec.element], rows_of(x, codec.block)
    # A stochastic code would be clipped where the scale is too small: round it up.
    up = codec.round == "stochastic"
    scale = block_scale(magnitude(rows).max(axis=1), float(form.sizes[-1]), codec.scale, up=up)
    usable = (scale > 0)[:, None]
    t = np.where(usable, rows * inverse(scale)[:, None], np.float32(0))
    if codec.round == "nearest":
        codes = form.nearest(t)
    else:
        codes = form.stochastic(t, counter_rng.uniform(key, index, t.size).reshape(t.shape))
    codes.reshape(-1)[len(x) :] = 0
    return np.concatenate([store_fields(scale, codec.scale), codes.reshape(-1)])


def _decode_float8(codec: Float8, granule: Bytes, n: int) -> Floats:
    layout = codec.layout()
    scale = load_fields(granule[: layout.codes_at(n)], codec.scale)
    codes = granule[layout.codes_at(n) : layout.used(n)].reshape(-1, layout.block)
    return canonical(FORMATS[codec.element].table[codes] * scale[:, None]).reshape(-1)[:n]


def _encode_mx(codec: Mx, x: Floats) -> Bytes:
    form = FORMATS[codec.element]
    rows = rows_of(x, MX_BLOCK).astype(np.float64)  # in which scaling by any power of two is exact
    top = np.abs(rows).max(axis=1)
    bad = ~np.isfinite(top)
    top = np.where(bad, 1.0, top)
    floor_log2 = np.frexp(top)[1] - 1
    largest = int(np.frexp(form.sizes[-1])[1]) - 1
    scale = np.where(top > 0, np.maximum(floor_log2 - largest + MX_BIAS, 0), 0)
    scale = np.where(bad, MX_NAN, scale)
    usable = ((scale > 0) & ~bad)[:, None]
    codes = form.nearest(np.where(usable, np.ldexp(rows, MX_BIAS - scale[:, None]), 0.0))
    codes.reshape(-1)[len(x) :] = 0
    if codec.code_bits == 4:
        codes = _pairs(codes)
    return np.concatenate([scale.astype(np.uint8), codes.reshape(-1)])


def _decode_mx(codec: Mx, granule: Bytes, n: int) -> Floats:
    layout = codec.layout()
    raw, codes = granule[: layout.codes_at(n)], granule[layout.codes_at(n) : layout.used(n)]
    scale = np.where(raw == MX_NAN, NAN, np.ldexp(np.float32(1), raw.astype(np.int32) - MX_BIAS))
    if codec.code_bits == 4:
        codes = _of_pairs(codes)
    values = FORMATS[codec.element].table[codes.reshape(-1, MX_BLOCK)]
    return canonical(values * scale.astype(np.float32)[:, None]).reshape(-1)[:n]


def _encode_nvfp4(x: Floats) -> Bytes:
    form, scale_form = FORMATS["e2m1"], FORMATS["e4m3"]
    rows = rows_of(x, NVFP4_BLOCK)
    top = magnitude(rows).max(axis=1)
    bad = top >= INFINITY
    largest = np.where(bad, 0, top).astype(np.uint32).view(np.float32)
    own = np.minimum(largest.max(keepdims=True) / (form.sizes[-1] * scale_form.sizes[-1]), NVFP4_CAP)
    own = np.where(own >= SMALLEST, own, np.float32(0))
    sixth = np.float32(1) / form.sizes[-1]
    codes_of_scales = scale_form.nearest(largest * inverse(own) * sixth)
    scale = scale_form.table[codes_of_scales] * own
    codes_of_scales = np.where(scale < SMALLEST, 0, codes_of_scales)
    usable = ((scale >= SMALLEST) & ~bad)[:, None]
    codes = form.nearest(np.where(usable, rows * inverse(scale)[:, None], np.float32(0)))
    codes.reshape(-1)[len(x) :] = 0
    stored = np.where(bad, E4M3_NAN, codes_of_scales).astype(np.uint8)
    return np.concatenate([stored, _pairs(codes), own.view(np.uint8)])


def _decode_nvfp4(codec: Nvfp4, granule: Bytes, n: int) -> Floats:
    layout = codec.layout()
    at, end = layout.codes_at(n), layout.dense(n)
    own = np.ascontiguousarray(granule[end : end + layout.trailer]).view(np.float32)
    scale = FORMATS["e4m3"].table[granule[:at]] * own
    scale = np.where(np.isfinite(scale), scale, NAN)
    values = FORMATS["e2m1"].table[_of_pairs(granule[at:end]).reshape(-1, NVFP4_BLOCK)]
    return canonical(values * scale[:, None]).reshape(-1)[:n]


def _pairs(codes: Bytes) -> Bytes:
    """Bytes that hold two codes of 4 bits each, the earlier one in the lower half."""
    pairs = codes.reshape(-1, 2)
    joined: Bytes = pairs[:, 0] | pairs[:, 1] << np.uint8(4)
    return joined


def _of_pairs(codes: Bytes) -> Bytes:
    """The inverse of :func:`_pairs`."""
    return np.stack([codes & 15, codes >> 4], axis=1)
