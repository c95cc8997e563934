"""Simulated training steps for the autotuner: step times with noise, drift and bursts, and what it chooses by them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from dtcomm.compress.autotune_model import NONE, AutoConfig
from dtcomm.compress.spec import Scheme
from dtcomm.ddp.autotune import measure
from dtcomm.ddp.autotune.measure import BucketTiming
from dtcomm.ddp.autotune.tuner import Tuner


class Link:
    """`Consensus` of ranks that are all alike, over a link whose rate a test may change."""

    ranks = 2
    device = None

    def __init__(self, gbit: float) -> None:
        self.gbit = gbit

    def max(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def probe(self) -> tuple[float, float]:
        return 1e-4, 8e-9 / self.gbit

    def cpu_oversubscribed(self) -> bool:
        return False

    def in_memory(self) -> bool:
        return False

    def emulated(self) -> bool:
        return False

    def seconds(self, sent: float) -> float:
        return 1e-4 + sent * 8e-9 / self.gbit


@dataclass(frozen=True)
class Noise:
    """How step times vary around those of the machine at rest.

    Attributes:
        relative: The standard deviation of the logarithm of each step's time.
        drift: The standard deviation by which the machine's speed changes from step to step; it tends back to 1.
        burst: The probability with which a step begins a burst of 5 steps that take 1.5 times as long.
    """

    relative: float
    drift: float = 0.0
    burst: float = 0.0

    def factors(self, rng: random.Random, steps: int) -> list[float]:
        """Return the factor of each step."""
        level, burst, factors = 0.0, 0, []
        for _ in range(steps):
            level = 0.95 * level + rng.gauss(0.0, self.drift)
            burst = 5 if rng.random() < self.burst else max(0, burst - 1)
            factors.append(math.exp(level + rng.gauss(0.0, self.relative)) * (1.5 if burst else 1.0))
        return factors


@dataclass(frozen=True)
class Run:
    """What a simulated run chose.

    Attributes:
        choice: The last choice: "plain DDP", or the name of a codec.
        steps: The steps until the first choice.
        decisions: The actions of all decisions.
        reasons: Their reasons.
        used: The plan of every step.
    """

    choice: str
    steps: int
    decisions: list[str]
    reasons: list[str]
    used: list[str]


def simulate(
    seconds: Mapping[str, float],
    noise: Noise,
    seed: int,
    *,
    steps: int = 1000,
    every: int = 500,
    slow_steps: Mapping[str, Sequence[int]] = {},
    slow_factor: float = 2.0,
) -> Run:
    """Train for ``steps`` steps, each of which takes the time of its plan and the noise.

    Args:
        seconds: The step time of each plan: "plain", "none" and codecs.
        noise: How times vary.
        seed: The seed of the noise.
        steps: The number of steps.
        every: The steps between two checks.
        slow_steps: Steps that take longer where they use a plan, by plan.
        slow_factor: How many times as long.
    """
    # The link is slow, so that the model proposes every candidate.
    candidates = [name for name in seconds if name not in ("plain", "none")]
    tuner = Tuner(AutoConfig(every=every, candidates=candidates or ["int8"]), Link(0.05))
    factors = noise.factors(random.Random(seed), steps)
    used: list[str] = []
    first = steps
    with mock.patch.object(measure, "kernel_seconds", fixed_kernel_seconds):
        for step in range(steps):
            tuner.begin_step(step)
            if tuner.needs_sample(step):
                tuner.sample_bucket(0, ["weight"], [_GRADIENT])
            if tuner.settled and first == steps:
                first = step
            name = "plain" if tuner.bypass else str(tuner.choose("weight", _GRADIENT).codec)
            used.append(name)
            took = seconds[name] * factors[step] * (slow_factor if step in slow_steps.get(name, ()) else 1.0)
            tuner.end_step(step, took, [BucketTiming(0.0, took, 10**6)])
    decisions = [decision.action for decision in tuner.decisions]
    choices = [action for action in decisions if action != "measure again"]
    reasons = [decision.reason for decision in tuner.decisions]
    return Run(choices[-1] if choices else "", first, decisions, reasons, used)


_GRADIENT = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))


def fixed_kernel_seconds(scheme: Scheme, **_: Any) -> tuple[float, float]:
    """Replace `dtcomm.ddp.autotune.measure.kernel_seconds`, so that candidates do not depend on this processor."""
    return (0.0, 0.0) if scheme == NONE else (1e-10, 1e-10)
