"""Simulated training steps for "auto": step times with noise, drift and bursts, and what it chooses by them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dtcomm.ddp.auto import ProcessGroupConsensus, Tuner


class AlikeRanks(ProcessGroupConsensus):
    """Two ranks that are alike, on two hosts."""

    def __init__(self) -> None:
        super().__init__(None)
        self.ranks = 2

    def max(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def in_memory(self) -> bool:
        return False

    def emulated(self) -> bool:
        return False


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
        choice: The choice: "plain DDP", or the name of a codec; empty if there is none.
        reason: Its reason.
        steps: The steps until the choice.
        used: The plan of every step until the choice.
    """

    choice: str
    reason: str
    steps: int
    used: list[str]


def simulate(
    seconds: Mapping[str, float],
    noise: Noise,
    seed: int,
    *,
    steps: int = 400,
    slow_steps: Mapping[str, Sequence[int]] = {},
    slow_factor: float = 2.0,
) -> Run:
    """Train for ``steps`` steps, each of which takes the time of its plan and the noise.

    Args:
        seconds: The step time of each plan: "plain", "none" and codecs.
        noise: How times vary.
        seed: The seed of the noise.
        steps: The number of steps.
        slow_steps: Steps that take longer where they use a plan, by plan.
        slow_factor: How many times as long.
    """
    candidates = [name for name in seconds if name not in ("plain", "none")]
    tuner = Tuner(candidates, AlikeRanks())
    factors = noise.factors(random.Random(seed), steps)
    used: list[str] = []
    for step in range(steps):
        tuner.begin_step(step)
        if tuner.settled:
            break
        name = "plain" if tuner.bypass else str(tuner.choose("weight", _GRADIENT).codec)
        used.append(name)
        took = seconds[name] * factors[step] * (slow_factor if step in slow_steps.get(name, ()) else 1.0)
        tuner.end_step(step, took)
    (decision,) = tuner.decisions or (None,)
    if decision is None:
        return Run("", "", steps, used)
    return Run(decision.action, decision.reason, decision.step, used)


_GRADIENT = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
