"""Floats of 8 and 4 bits: tables of all their numbers, and rounding by looking up the neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dtcomm.kernels.reference.floats import NAN, Bytes, Floats


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
    "e2m1": Minifloat(exponent=2, mantissa=1, bias=1, numbers=8),
}
