"""Which ranks of a run hold up the others, and whether their processors or their links are the cause.

`BalancedSampler` measures the ranks to size their batches, `RunMonitor` to report on them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SLOW_COMPUTE = 1.25  # times the seconds for a sample of the median rank
SLOW_LINK = 2.0  # times the seconds of a message on the median rank's faster link
WAITING_SHARE = 0.1  # of a step; where even the last rank waits less, no link is to blame


@dataclass(frozen=True, kw_only=True)
class RankSpeed:
    """What was measured of one rank in the last ``every`` steps.

    Attributes:
        rank: The rank in the group.
        samples: Its samples in a step.
        sample_s: Median seconds until all gradients of a step are computed, for each sample.
        wait_s: Median seconds that it then waits for communication, and so for slower ranks.
        link_s: Seconds of a message of 256 KiB on the faster of its links to the two ranks beside it.
    """

    rank: int
    samples: int
    sample_s: float
    wait_s: float
    link_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds until all gradients of a step are computed."""
        return self.samples * self.sample_s


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that holds up the others; ``str()`` says why.

    Attributes:
        rank: The rank in the group.
        cause: "slow compute" or "slow link".
        factor: How many times the median rank's time it takes.
    """

    rank: int
    cause: str
    factor: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.cause}, {self.factor:.2g} times the median rank's time"


def find_stragglers(speeds: Sequence[RankSpeed]) -> list[Straggler]:
    """Return the ranks that are slow, and whether their processors or their links are.

    A rank computes slowly if a sample takes it 1.25 times as long as the median rank. Its link is slow if communication
    takes more than a tenth of a step even on the rank that waits least, and messages over its faster link take twice as
    long as on the median rank. With two ranks there is one link, so none can be called slow.

    Args:
        speeds: What was measured, of all ranks.

    Returns:
        The slow ranks; a rank may appear with both causes.

    Example:
        >>> from dtcomm.extensions.extras import RankSpeed, find_stragglers
        >>> fast = RankSpeed(rank=0, samples=8, sample_s=0.01, wait_s=0.09)
        >>> slow = RankSpeed(rank=1, samples=8, sample_s=0.02, wait_s=0.01)
        >>> print(*find_stragglers([fast, slow]))
        rank 1: slow compute, 2 times the median rank's time
    """
    stragglers = []
    sample_s = statistics.median_low(speed.sample_s for speed in speeds)
    link_s = statistics.median_low(speed.link_s for speed in speeds)
    waiting = min(speed.wait_s / max(speed.compute_s + speed.wait_s, 1e-12) for speed in speeds)
    for speed in speeds:
        if speed.sample_s > SLOW_COMPUTE * sample_s:
            factor = speed.sample_s / sample_s
            stragglers.append(Straggler(rank=speed.rank, cause="slow compute", factor=factor))
        if waiting > WAITING_SHARE and link_s > 0 and speed.link_s > SLOW_LINK * link_s:
            stragglers.append(Straggler(rank=speed.rank, cause="slow link", factor=speed.link_s / link_s))
    return stragglers
