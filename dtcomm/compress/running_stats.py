"""What is usual of a figure that varies by factors: a running mean and deviation of its logarithm."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.9
SETTLED = 5  # values that a running mean wants before anything is compared with it
OUT_OF_LINE = 4.0  # deviations from it; minibatch losses near zero differ by factors from step to step


@dataclass
class Usual:
    """Running mean and deviation of the logarithms that it is given."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0
    beyond: int = 0  # values in a row that are out of line

    def take(self, value: float, limit: float, lasting: int) -> float | None:
        """How far above the mean a value is that is the `lasting`-th in a row beyond `limit`; else None."""
        over = value - self.mean
        if self.count >= SETTLED and over > max(limit, OUT_OF_LINE * self.deviation):
            self.beyond += 1  # what is out of line does not move the mean
            return over if self.beyond >= lasting else None
        self.beyond = 0
        if self.count == 0:
            self.mean = value
        else:
            self.deviation += (1 - DECAY) * (abs(over) - self.deviation)
            self.mean += (1 - DECAY) * over
        self.count += 1
        return None
