"""A time budget: measurements that no longer fit are skipped, and each skip is printed and kept in the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class Budget:
    """So many ``seconds`` from now on, by ``now``."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.cuts: list[str] = []
        self._now = now
        self._end = now() + seconds

    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._end - self._now())

    def allows(self, what: str, seconds: float = 0.0) -> bool:
        """Whether so many seconds are left for it, or any; where not, it is cut."""
        if self.left() > seconds:
            return True
        self.cuts.append(what)
        need = f", and this may take {seconds:.0f} s" if seconds else ""
        print(
            f"CUT: {what}: {self.left():.0f} of {self.seconds:.0f} seconds are left{need}; more with --seconds N",
            file=sys.stderr,
        )
        return False
