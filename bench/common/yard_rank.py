"""One rank of the hand-written all-reduce and of the memory floor."""

from __future__ import annotations

from bench.common import native
from bench.common.native import Tuning, Yardstick
from bench.common.pool import pin


class YardRank:
    """A rank with private buffers of ``largest`` bytes, at addresses that differ in the cache sets, and the segment."""

    def __init__(self, rank: int, ranks: int, address: tuple[str, int, int, int], largest: int) -> None:
        pin(rank)
        self.yardstick = Yardstick(address, rank)
        self.x = native.library().yardstick_allocate(largest, (2 * rank + 1) * native.SKEW)
        self.y = native.library().yardstick_allocate(largest, (2 * rank + 2) * native.SKEW)

    def measure(self, algorithm: int, numel: int, settings: dict[str, int], warm: int, iters: int) -> float:
        """Return the seconds of a call on this rank."""
        x = None if algorithm == native.DIRECT else self.x
        return self.yardstick.time(algorithm, x, self.y, numel, Tuning(**settings), warm=warm, iters=iters)

    def close(self) -> None:
        """Unmap the segment."""
        self.yardstick.close()
