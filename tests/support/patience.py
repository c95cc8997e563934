"""How long something took, less what the machine kept it waiting for: promises of time can be tested under load."""

from __future__ import annotations

import time
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")


class Patience:
    """A stopwatch that stands still while some process of the machine has to wait for a core.

    That is counted by the kernel (pressure stall information); where it does not, this is an ordinary stopwatch. On a
    machine with idle cores the two are the same, on one that is overloaded it shows next to nothing: what it is for is
    an upper limit, which must hold where there is a core to be had.
    """

    def __init__(self) -> None:
        self._begun, self._stalled = time.monotonic(), stalled()

    def seconds(self) -> float:
        return max(0.0, time.monotonic() - self._begun - (stalled() - self._stalled))


def stalled() -> float:
    """The seconds since the start of the machine in which something waited for a core; 0 where nobody counts them."""
    try:
        some = PRESSURE.read_text().splitlines()[0]
        return int(some.rpartition("total=")[2]) * 1e-6
    except (OSError, IndexError, ValueError):
        return 0.0
