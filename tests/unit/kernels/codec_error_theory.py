"""The error of a format on Gaussian data, integrated in float64 from the values that the format can represent.

This code is independent of the codecs: a format is a list of the values of its codes and a rule that scales the list to
a block's largest element. A block's error is the integral of the squared distance to the nearest value over the density
of the elements, conditional on the largest one, averaged over the density of that one.

Published values that test_codec_errors.py compares this with: J. Max, "Quantizing for minimum distortion", IRE
Transactions on Information Theory 6, 1960 (tables I and II); the signal-to-noise ratio of block-scaled integers in
Chen et al., "INT v.s. FP: A Comprehensive Study of Fine-Grained Low-bit Quantization Formats", arXiv:2510.25602,
2025, theorem 1; and C. Shannon's rate-distortion bound for a Gaussian source, 1959: no format of R bits has a
relative error under 2^-R.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

_erf: Callable[[Any], Any] = np.vectorize(math.erf, otypes=[np.float64])


def density(x: Array) -> Array:
    """Return the density of the standard normal distribution."""
    return np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi)


def below(x: Array) -> Array:
    """Return the cumulative standard normal distribution at x."""
    return np.asarray((1 + _erf(x / math.sqrt(2))) / 2)


def floats(exponents: range, mantissa_bits: int) -> Array:
    """Return zero and the positive values 2^e * (1 + i / 2^m) of a float, with subnormals below the first exponent."""
    steps = np.arange(1 << mantissa_bits) / (1 << mantissa_bits)
    normal = np.concatenate([2.0**e * (1 + steps) for e in exponents])
    return np.concatenate([2.0 ** exponents[0] * steps, normal])


INT: dict[int, Array] = {bits: np.arange(float(1 << (bits - 1))) for bits in range(2, 9)}
E4M3 = floats(range(-6, 9), 3)[:-1]  # its last pattern is NaN: 448 is the largest value
E5M2 = floats(range(-14, 16), 2)
E3M4 = floats(range(-2, 5), 4)[:-1]  # as of e4m3: 30 is the largest value
E2M1 = floats(range(3), 1)
FP16 = floats(range(-14, 4), 10)  # beyond 16 a standard normal has nothing
BF16 = floats(range(-24, 4), 7)


def to_largest(values: Array) -> Callable[[float], float]:
    """Return the scale of integers and float8: the block's largest element becomes the largest value."""
    return lambda top: top / float(values[-1])


def to_power(values: Array) -> Callable[[float], float]:
    """Return the scale of OCP Microscaling: a power of two that aligns the largest element's and value's exponents."""
    most = math.floor(math.log2(values[-1]))
    return lambda top: 2.0 ** (math.floor(math.log2(top)) - most)


def to_e4m3(values: Array, granule: int) -> Callable[[float], float]:
    """Return the scale of NVFP4: the nearest e4m3 multiple of a scale that maps a typical granule's largest to 448."""
    own = crest(granule) / (float(values[-1]) * float(E4M3[-1]))
    return lambda top: own * float(E4M3[np.argmin(np.abs(E4M3 - top / float(values[-1]) / own))])


def distortion(values: Array, reach: float) -> float:
    """Return the mean of (x - nearest value)^2 over a standard normal cut at +-reach; `values` are sorted, from 0."""
    values = values[: int(np.searchsorted(values, reach)) + 2]
    edges = np.concatenate([[0.0], (values[1:] + values[:-1]) / 2, [math.inf]]).clip(max=reach)
    a, b = edges[:-1], edges[1:]
    share, at_a, at_b = below(b) - below(a), density(a), density(b)
    second = share + a * at_a - b * at_b
    cells = second - 2 * values * (at_a - at_b) + np.square(values) * share
    return float(cells.sum() / (below(np.array(reach)) - 0.5))


def random_distortion(values: Array, reach: float) -> float:
    """Return what `distortion` does if an element is rounded up with the probability that keeps its mean.

    Between two values l and h the mean square of the error at x is (x - l)(h - x).
    """
    values = values[: int(np.searchsorted(values, reach)) + 1]
    low, high = values[:-1], values[1:]
    a, b = low, high.clip(max=reach)
    share, at_a, at_b = below(b) - below(a), density(a), density(b)
    first, second = at_a - at_b, share + a * at_a - b * at_b
    cells = (low + high) * first - second - low * high * share
    return float(cells.sum() / (below(np.array(reach)) - 0.5))


def block_error(
    values: Array,
    block: int,
    scale: Callable[[float], float],
    distorted: Callable[[Array, float], float] = distortion,
) -> float:
    """Return the relative L2 error of blocks of `block` standard normal elements with a shared, exact scale."""
    tops = np.linspace(0.2, 8.0, 781)
    inside = 2 * below(tops) - 1
    weights = block * inside ** (block - 1) * 2 * density(tops)
    errors = []
    for top in tops:
        step = scale(float(top))
        own = float(np.min(np.abs(values * step - top))) ** 2  # of the largest element
        errors.append(((block - 1) * distorted(values * step, float(top)) + own) / block)
    return math.sqrt(float((weights * np.array(errors)).sum() / weights.sum()))


def range_error(bits: int, block: int) -> float:
    """Return the error of 2^bits levels from a block's least to its greatest element, both of which are levels.

    The others lie evenly between two levels (Bennett, 1948): the mean square of the error is a twelfth of the squared
    step, which is right from 16 levels on. The range of a block is integrated by its mean square, with the joint
    density of the least and the greatest of standard normal elements.
    """
    grid = np.linspace(-7.0, 7.0, 701)
    least, greatest = grid[:, None], grid[None, :]
    between = np.clip(below(grid)[None, :] - below(grid)[:, None], 0, None)
    weights = (
        np.where(greatest > least, between ** (block - 2), 0)
        * density(grid)[:, None]
        * density(grid)[None, :]
    )
    square = float((weights * np.square(greatest - least)).sum() / weights.sum())
    return math.sqrt((block - 2) / block * square / 12) / (2**bits - 1)


def cast_error(values: Array) -> float:
    """Return the relative L2 error if every element is rounded by itself."""
    return math.sqrt(distortion(values, float(values[-1])))


def crest(block: int) -> float:
    """Return a block's crest factor: the root mean square of its largest magnitude."""
    tops = np.linspace(0.0, 9.0, 9001)
    weights = (2 * below(tops) - 1) ** (block - 1) * density(tops)
    return math.sqrt(float((weights * np.square(tops)).sum() / weights.sum()))


def published_integer_error(bits: int, block: int) -> float:
    """Return the error of theorem 1 of arXiv:2510.25602, for exact scales.

    The signal-to-noise ratio is 4.78 + 6.02 bits - 20 lg(crest factor) decibels.
    """
    return float(10 ** (-(4.78 + 6.02 * bits - 20 * math.log10(crest(block))) / 20))


def sign_error(block: int) -> float:
    """Return the error of one bit and the block's mean magnitude; Max's 0.3634 = 1 - 2/pi for long blocks."""
    return math.sqrt((1 - 2 / math.pi) * (1 - 1 / block))


def top_error(ratio: float) -> float:
    """Return the error if the share `ratio` of largest magnitudes is kept exactly and the rest is dropped."""
    low, high = 0.0, 10.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if 2 * (1 - below(np.array(middle))) > ratio else (low, middle)
    return math.sqrt(1 - ratio - 2 * low * float(density(np.array(low))))


def random_error(ratio: float) -> float:
    """Return the error of a random share `ratio`, scaled up to be unbiased."""
    return math.sqrt(1 / ratio - 1)


def _scaled(
    values: Array, block: int, rule: Callable[[Array], Callable[[float], float]] = to_largest
) -> float:
    return block_error(values, block, rule(values))


def _at_random(values: Array, block: int) -> float:
    return block_error(values, block, to_largest(values), random_distortion)


#: Relative L2 error on Gaussian data by spec. A rotation leaves Gaussian data Gaussian, so it changes no error.
EXPECTED: dict[str, Callable[[], float]] = {
    "none": lambda: 0.0,
    "lossless": lambda: 0.0,
    "fp16": lambda: cast_error(FP16),
    "bf16": lambda: cast_error(BF16),
    "bf16:round=stochastic": lambda: math.sqrt(random_distortion(BF16, float(BF16[-1]))),
    **{f"int{bits}": lambda bits=bits: _scaled(INT[bits], 32) for bits in range(8, 1, -1)},
    "int8:block=256": lambda: _scaled(INT[8], 256),
    "int4:block=128": lambda: _scaled(INT[4], 128),
    **{f"int{bits}:round=stochastic": lambda bits=bits: _at_random(INT[bits], 32) for bits in (8, 4)},
    **{f"int{bits}:symmetric=false": lambda bits=bits: range_error(bits, 32) for bits in (8, 4)},
    **{f"int{bits}:rotate=hadamard": lambda bits=bits: _scaled(INT[bits], 32) for bits in (4, 3)},
    **{f"int{bits}:block=128,rotate=hadamard": lambda bits=bits: _scaled(INT[bits], 128) for bits in (4, 3)},
    "fp8_e4m3": lambda: _scaled(E4M3, 128),
    "fp8_e4m3:round=stochastic": lambda: _at_random(E4M3, 128),
    "fp8_e5m2": lambda: _scaled(E5M2, 128),
    "fp8_e3m4": lambda: _scaled(E3M4, 128),
    "fp8_e3m4:round=stochastic": lambda: _at_random(E3M4, 128),
    "mxfp8": lambda: _scaled(E4M3, 32, to_power),
    "mxfp8:element=e5m2": lambda: _scaled(E5M2, 32, to_power),
    "mxfp4": lambda: _scaled(E2M1, 32, to_power),
    "mxfp4:rotate=hadamard": lambda: _scaled(E2M1, 32, to_power),
    "nvfp4": lambda: block_error(E2M1, 16, to_e4m3(E2M1, 4096)),
    "sign": lambda: sign_error(256),
    "sign:rotate=hadamard": lambda: sign_error(256),
    "topk": lambda: top_error(41 / 4096),
    "topk:ratio=0.1": lambda: top_error(410 / 4096),
    "topk:ratio=0.1,values=int8": lambda: top_error(410 / 4096),  # int8 adds a hundredth
    "randk": lambda: random_error(41 / 4096),
    "randk:ratio=0.1": lambda: random_error(410 / 4096),
    "randk:positions=shared": lambda: random_error(41 / 4096),
}
