"""Distance between the CPUs of this host's ranks, measured by the round trip of a cache line.

Two cores that share a cache exchange a line several times faster than cores of different caches or sockets, and virtual
CPUs move between physical cores while a program runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from dtcomm import _C
from dtcomm.planner.cost_model import FAR, NEAR

FAR_NS = 250.0  # a longer round trip is far; the engine has the same limit
_BATCHES, _TRIPS = 20, 100


def first_two_cpus() -> tuple[int, ...]:
    """Return the first two CPUs this process may run on, or fewer; call it before the rank is pinned."""
    return tuple(sorted(os.sched_getaffinity(0))[:2])


def round_trip_ns(cpus: Sequence[int]) -> float | None:
    """Return the nanoseconds of a cache line's round trip, or None without two usable CPUs. Takes 1 to 3 ms."""
    if len(cpus) < 2:
        return None
    nanoseconds = _C.round_trip_ns(cpus[0], cpus[1], _BATCHES, _TRIPS)
    return nanoseconds if nanoseconds >= 0 else None


def placement(cpus: Sequence[int] | None = None) -> str:
    """Return ``near`` or ``far``, the names in tables of `dtcomm tune`, or an empty string if it is unknown."""
    nanoseconds = round_trip_ns(first_two_cpus() if cpus is None else cpus)
    return "" if nanoseconds is None else FAR if nanoseconds > FAR_NS else NEAR
