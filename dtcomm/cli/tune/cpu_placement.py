"""How far apart the CPUs are that ranks of this host run on: half of what their messages' times depend on.

Two cores of one cache pass a line on in a fraction of the time that two of different caches or sockets take, and
virtual CPUs move between them while a program runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from dtcomm import _C
from dtcomm.planner.cost_model import FAR, NEAR

FAR_NS = 250.0  # of a round trip; the engine draws the line there too
_BATCHES, _TRIPS = 20, 100


def cpus() -> tuple[int, ...]:
    """The first two that this process may run on, fewer where it has fewer. Ask before a rank is pinned."""
    return tuple(sorted(os.sched_getaffinity(0))[:2])


def round_trip_ns(between: Sequence[int]) -> float | None:
    """Of a cache line, in nanoseconds; None where there are not two CPUs, or one may not be used. Takes 1 to 3 ms."""
    if len(between) < 2:
        return None
    found = _C.round_trip_ns(between[0], between[1], _BATCHES, _TRIPS)
    return found if found >= 0 else None


def placement(between: Sequence[int] | None = None) -> str:
    """``near`` or ``far``, as tables of `dtcomm tune` name it; empty where it cannot be told."""
    found = round_trip_ns(cpus() if between is None else between)
    return "" if found is None else FAR if found > FAR_NS else NEAR
