"""Inputs that reveal mistakes, all reproducible. `floats(kind, n)` returns fp32; callers cast it to other types."""

from __future__ import annotations

from collections.abc import Callable

import torch

KINDS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {}


def kind(
    make: Callable[[int, torch.Generator], torch.Tensor],
) -> Callable[[int, torch.Generator], torch.Tensor]:
    KINDS[make.__name__] = make
    return make


def floats(name: str, n: int, seed: int = 0) -> torch.Tensor:
    """`n` floats of a kind."""
    generator = torch.Generator().manual_seed(seed)
    return KINDS[name](n, generator).to(torch.float32)


def _normal(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(n, generator=generator)


def _pick(values: list[float], n: int, generator: torch.Generator) -> torch.Tensor:
    index = torch.randint(len(values), (n,), generator=generator)
    return torch.tensor(values, dtype=torch.float64).to(torch.float32)[index]


@kind
def normal(n: int, generator: torch.Generator) -> torch.Tensor:
    return _normal(n, generator)


@kind
def wide(n: int, generator: torch.Generator) -> torch.Tensor:
    """Magnitudes from subnormal to Inf."""
    return _normal(n, generator) * torch.exp(_normal(n, generator) * 35)


@kind
def blocks_apart(n: int, generator: torch.Generator) -> torch.Tensor:
    """Runs of 1e-30, 1e30, zeros, subnormals and ones: each block keeps its own scale."""
    factors = torch.tensor([1e-30, 1e30, 0.0, 1e-40, 1.0, 3e38, 2e-38])
    return _normal(n, generator).clamp(-1, 1) * factors.repeat_interleave(48)[torch.arange(n) % (7 * 48)]


@kind
def ties(n: int, generator: torch.Generator) -> torch.Tensor:
    """Halves of integers up to 127 with a 127 in every block: half of them lie midway between two codes."""
    x = torch.randint(-254, 255, (n,), generator=generator) / 2
    x[:: min(16, max(n, 1))] = 127.0
    return x


@kind
def nonfinite(n: int, generator: torch.Generator) -> torch.Tensor:
    """Mostly finite numbers: some blocks have no NaN and no Inf, some have NaN or Inf, some have both."""
    x = _normal(n, generator)
    for value, share in ((float("nan"), 0.004), (float("inf"), 0.003), (-float("inf"), 0.003)):
        x[torch.rand(n, generator=generator) < share] = value
    return x


@kind
def extremes(n: int, generator: torch.Generator) -> torch.Tensor:
    """The ends of fp32, fp16 and bf16, both zeros, and the neighbours of their rounding boundaries."""
    largest = 3.4028234663852886e38
    positive = [0.0, 1e-45, 1.1754942e-38, 1.17549435e-38, 1.4e-36, 2.98e-8, 5.96e-8, 6.1e-5, 1.0, 1.00390625]
    positive += [1.01171875, 2049.0, 2051.0, 65504.0, 65519.996, 65520.0, 3.38e38, 3.3961e38, largest]
    return _pick(positive + [-value for value in positive], n, generator)


@kind
def bits(n: int, generator: torch.Generator) -> torch.Tensor:
    """Any bit pattern: NaNs of every sign and payload among them."""
    words = torch.randint(-(2**31), 2**31, (n,), generator=generator)
    return words.to(torch.int32).view(torch.float32)


@kind
def zeros(n: int, generator: torch.Generator) -> torch.Tensor:
    """Both zeros."""
    return _pick([0.0, -0.0], n, generator)


@kind
def offset(n: int, generator: torch.Generator) -> torch.Tensor:
    """Far from zero, as zero points are meant for."""
    return _normal(n, generator) * 0.01 + 5


@kind
def negative(n: int, generator: torch.Generator) -> torch.Tensor:
    return -_normal(n, generator).abs() - 1


@kind
def constant(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.full((n,), 0.1)


@kind
def outlier(n: int, generator: torch.Generator) -> torch.Tensor:
    """One element in about a hundred is ten thousand times as large as the rest."""
    x = _normal(n, generator)
    x[torch.rand(n, generator=generator) < 0.01] *= 1e4
    return x


# Around the limits of vectors (8, 16, 32, 64), blocks and granules.
SIZES = (0, 1, 3, 15, 16, 17, 31, 32, 33, 63, 65, 127, 257, 1000, 1023, 1024, 1025, 2047, 4096, 4129)
