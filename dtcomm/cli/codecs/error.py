"""The error of a codec on a sample, computed in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dtcomm.cli.codecs.samples import Sample
from dtcomm.codecs import Codec
from dtcomm.kernels import counter_rng
from dtcomm.kernels.ops import decode, encode

#: Key of every encoding, so that stochastic rounding is the same in every run.
KEY = counter_rng.mix_key(1, 0, 0)

#: Elements of the blocks of `worst_block` for codecs without blocks.
BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Error:
    """Error of the decoded values y for inputs x: |x - y| / |x|, the same of the worst block, and the cosine.

    A value is None if it does not exist; a tensor of zeros has no relative error.
    """

    numel: int
    wire_bytes: int
    relative_l2: float | None
    worst_block: float | None
    cosine: float | None


@dataclass
class _Sums:
    """Sums over elements in float64."""

    numel: int = 0
    wire_bytes: int = 0
    input: float = 0.0  # sum of x^2
    output: float = 0.0  # sum of y^2
    both: float = 0.0  # sum of x y
    lost: float = 0.0  # sum of (x - y)^2
    worst: float = 0.0  # largest |x - y|^2 / |x|^2 of a block

    def add(self, other: _Sums) -> None:
        self.numel += other.numel
        self.wire_bytes += other.wire_bytes
        self.input += other.input
        self.output += other.output
        self.both += other.both
        self.lost += other.lost
        self.worst = _larger(self.worst, other.worst)

    def _cosine(self) -> float | None:
        if self.input and not self.lost:
            return 1.0  # the division would round
        return _finite(_ratio(self.both, math.sqrt(self.input) * math.sqrt(self.output)))

    def error(self) -> Error:
        return Error(
            numel=self.numel,
            wire_bytes=self.wire_bytes,
            relative_l2=_root(self.lost, self.input),
            worst_block=_finite(math.sqrt(self.worst)),
            cosine=self._cosine(),
        )


def measure(codec: Codec, sample: Sample) -> tuple[Error, dict[str, Error]]:
    """Return the error on the whole sample and on each of its tensors, which are encoded separately."""
    total = _Sums()
    by_tensor = {}
    for name, x in sample.tensors.items():
        sums = _sums(codec, x)
        total.add(sums)
        by_tensor[name] = sums.error()
    return total.error(), by_tensor


def comparison_block(codec: Codec) -> int:
    """Return the elements of a block of `worst_block`: the codec's block, a granule of a sparse codec, otherwise 32."""
    layout = codec.layout()
    if layout.kept:
        return layout.granule
    return BLOCK if codec.elementwise else layout.block


def _sums(codec: Codec, x: torch.Tensor) -> _Sums:
    payload = encode(codec, x, key=KEY)
    before = x.numpy().astype(np.float64)
    after = decode(codec, payload, x.numel()).numpy().astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        lost = before - after
        return _Sums(
            numel=x.numel(),
            wire_bytes=payload.numel(),
            input=float(np.square(before).sum()),
            output=float(np.square(after).sum()),
            both=float((before * after).sum()),
            lost=float(np.square(lost).sum()),
            worst=_worst(before, lost, comparison_block(codec)),
        )


def _worst(x: npt.NDArray[np.float64], lost: npt.NDArray[np.float64], block: int) -> float:
    """Return the largest share of its energy that a block loses; zero blocks that stay zero lose nothing."""
    pad = (0, -len(x) % block)
    energy, gone = (np.square(np.pad(values, pad)).reshape(-1, block).sum(axis=1) for values in (x, lost))
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where((energy == 0) & (gone == 0), 0.0, gone / energy)
    return float(shares.max(initial=0.0))


def _larger(a: float, b: float) -> float:
    """Return the larger value, or NaN if one is NaN."""
    return a if a > b or a != a else b


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _root(lost: float, energy: float) -> float | None:
    ratio = _ratio(lost, energy)
    return None if not math.isfinite(ratio) else math.sqrt(ratio)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
