"""Trials: candidate assignments of codecs, tried on real steps in turn.

A few steps of each tell candidates apart that differ by much. Those near the best are tried again in the opposite
order, so that a drift of the machine or of the training does not favour the same ones; all steps of a candidate count.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtcomm.compress.autotune_model import CodecAssignment
from dtcomm.ddp.autotune.consensus import Consensus

NEAR = 1.2  # times the best; steps of a busy machine vary as much
MAX_ROUNDS = 3


@dataclass
class Trials:
    """The trials of several candidates.

    Attributes:
        candidates: In the order of the first round.
        seconds: This rank's step times, by candidate.
        round: The number of rounds that are over.
    """

    candidates: Sequence[CodecAssignment]
    seconds: list[list[float]] = field(default_factory=list)
    round: int = 0
    _remaining: list[int] = field(default_factory=list)  # indices of the candidates of this round

    def __post_init__(self) -> None:
        self.seconds = self.seconds or [[] for _ in self.candidates]
        self._remaining = [index for index, seconds in enumerate(self.seconds) if not seconds]

    @property
    def current(self) -> CodecAssignment:
        """The candidate to try now."""
        return self.candidates[self._remaining[0]]

    @property
    def running(self) -> bool:
        """Whether a candidate remains in this round."""
        return bool(self._remaining)

    def add_steps(self, seconds: Sequence[float]) -> None:
        """Add the step times of the current candidate, and go to the next one."""
        self.seconds[self._remaining.pop(0)] += seconds

    def step_seconds(self, consensus: Consensus) -> list[float]:
        """Return the step time of each candidate: the median on the slowest rank."""
        medians = [statistics.median(seconds) for seconds in self.seconds]
        return consensus.max(medians) if medians else []

    def start_next_round(self, step_seconds: Sequence[float]) -> bool:
        """Start a round of the candidates near the best, the same on all ranks; return whether there is one."""
        self.round += 1
        near = [index for index, seconds in enumerate(step_seconds) if seconds <= NEAR * min(step_seconds)]
        if self.round < MAX_ROUNDS and len(near) > 1:
            self._remaining = near[::-1] if self.round % 2 else near
        return self.running


def runners_up(
    tried: Sequence[tuple[CodecAssignment, float]], chosen: CodecAssignment, limit: int = 2
) -> list[CodecAssignment]:
    """Return the candidates near the choice: the best lossless one, then the best others."""
    chosen_seconds = next(seconds for candidate, seconds in tried if candidate is chosen)
    near = [
        (seconds, candidate)
        for candidate, seconds in tried
        if candidate is not chosen and seconds <= NEAR * chosen_seconds
    ]
    near.sort(key=lambda pair: pair[0])
    lossless = [candidate for _, candidate in near if candidate.lossless][:1]
    return [*lossless, *(candidate for _, candidate in near if candidate not in lossless)][:limit]
