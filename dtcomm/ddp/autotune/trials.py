"""Plans tried on real steps, by turns, until one is ahead of what else there is by more than steps vary.

A few steps of each tell plans apart that differ by much. Those that come near the best are tried again, in the opposite
order, so that what drifts meanwhile (the machine, the training) does not fall to the same ones; all of a plan's steps
count together.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtcomm.compress.autotune_model import Plan
from dtcomm.ddp.rank_agreement import Consensus

NEAR = 1.2  # times the best: steps of a busy machine vary as much
ROUNDS = 3


@dataclass
class Trials:
    """``plans`` in the order of the first round; ``seconds`` of their steps on this rank, by plan."""

    plans: Sequence[Plan]
    seconds: list[list[float]] = field(default_factory=list)
    round: int = 0
    _left: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seconds = self.seconds or [[] for _ in self.plans]
        self._left = [at for at, each in enumerate(self.seconds) if not each]

    @property
    def now(self) -> Plan:
        """The plan whose turn it is."""
        return self.plans[self._left[0]]

    @property
    def running(self) -> bool:
        """Whether somebody's turn is left."""
        return bool(self._left)

    def took(self, seconds: Sequence[float]) -> None:
        """The steps of the plan whose turn it was."""
        self.seconds[self._left.pop(0)] += seconds

    def agreed(self, consensus: Consensus) -> list[float]:
        """What a step takes, by plan: medians of the slowest rank."""
        mine = [statistics.median(each) for each in self.seconds]
        return consensus.agree(mine) if mine else []

    def again(self, found: Sequence[float]) -> bool:
        """Whether another round is to be: of those near the best, whichever they are on all ranks."""
        self.round += 1
        near = [at for at, seconds in enumerate(found) if seconds <= NEAR * min(found)]
        if self.round < ROUNDS and len(near) > 1:
            self._left = near[::-1] if self.round % 2 else near
        return self.running


def rivals(tried: Sequence[tuple[Plan, float]], chosen: Plan, most: int = 2) -> list[Plan]:
    """What was near the choice: the best that loses nothing, and the best of the rest."""
    usual = next(seconds for plan, seconds in tried if plan is chosen)
    near = [(seconds, plan) for plan, seconds in tried if plan is not chosen and seconds <= NEAR * usual]
    near.sort(key=lambda each: each[0])
    lossless = [plan for _, plan in near if plan.plain][:1]
    return [*lossless, *(plan for _, plan in near if plan not in lossless)][:most]
