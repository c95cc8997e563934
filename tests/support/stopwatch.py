"""Time limits for tests that run on busy machines: the CPU time of a process is bounded as well as the elapsed time."""

from __future__ import annotations

import time
from typing import NamedTuple


class Elapsed(NamedTuple):
    """Elapsed seconds and CPU seconds of a process, over all its threads."""

    wall_s: float
    cpu_s: float

    def within(self, cpu_s: float, wall_s: float) -> bool:
        """Return whether both times are below their limits.

        CPU time hardly depends on other processes, so its limit can be the promised time: it catches waits that spin.
        The limit of the elapsed time must leave room for a busy machine, and be below the timeout that would end the
        operation otherwise: it catches waits that sleep.
        """
        return self.cpu_s < cpu_s and self.wall_s < wall_s


class Stopwatch:
    """Measures a process's time since its construction."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def elapsed(self) -> Elapsed:
        return Elapsed(time.monotonic() - self._wall, time.process_time() - self._cpu)
