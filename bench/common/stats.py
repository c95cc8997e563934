"""Medians, spreads and ratios of repeated timings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a call over several repetitions: median, quartiles, extremes."""

    median: float
    low: float
    high: float
    best: float
    worst: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarize ``seconds``, which must not be empty."""
        ordered = sorted(seconds)
        quartiles = (
            statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
        )
        return cls(
            median=statistics.median(ordered),
            low=quartiles[0],
            high=quartiles[2],
            best=ordered[0],
            worst=ordered[-1],
            repetitions=len(ordered),
        )

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a fraction of the median."""
        return (self.high - self.low) / self.median

    def as_dict(self) -> dict[str, object]:
        """Return microseconds, for a result file."""
        return {
            "median_us": round(self.median * 1e6, 3),
            "quartiles_us": [round(self.low * 1e6, 3), round(self.high * 1e6, 3)],
            "best_us": round(self.best * 1e6, 3),
            "worst_us": round(self.worst * 1e6, 3),
            "repetitions": self.repetitions,
        }


def iterations(seconds: float, budget: float, most: int = 2000) -> int:
    """Return how many calls of about ``seconds`` each fit into ``budget`` seconds; at least one."""
    return max(1, min(most, int(budget / max(seconds, 1e-9))))
