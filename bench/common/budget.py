"""A time budget: measurements that no longer fit are skipped, and each skip is printed and kept in the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class Budget:
    """A limit of ``seconds`` from the time of construction on; ``option`` sets it."""

    def __init__(
        self, seconds: float, now: Callable[[], float] = time.monotonic, option: str = "--seconds N"
    ) -> None:
        self.seconds, self.option = seconds, option
        self.cuts: list[str] = []
        self._now = now
        self._end = now() + seconds

    def left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self._end - self._now())

    def allows(self, name: str, seconds: float = 0.0) -> bool:
        """Return whether more than ``seconds`` remain; if not, record and print that ``name`` is skipped."""
        if self.left() > seconds:
            return True
        self.cuts.append(name)
        need = f", and this may take {seconds:.0f} s" if seconds else ""
        print(
            f"CUT: {name}: {self.left():.0f} of {self.seconds:.0f} seconds are left{need}; more with {self.option}",
            file=sys.stderr,
        )
        return False
