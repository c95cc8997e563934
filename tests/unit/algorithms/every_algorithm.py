"""What the tests of schedules and runtimes enumerate: every algorithm of every collective."""

from __future__ import annotations

from dtcomm import algorithms
from dtcomm.algorithms import registry
from dtcomm.schedule import Schedule
from dtcomm.schedule.ir import ROOTED

NAMES = [(c, name) for c in algorithms.collectives() for name in algorithms.available(c)]


def hosts_for(name: str, ranks: int) -> tuple[int, ...] | None:
    """Two hosts as unequal as an odd number makes them, for algorithms that have levels."""
    if not name.startswith("hierarchical"):
        return None
    return (ranks - ranks // 2, ranks // 2) if ranks > 1 else (1,)


def build(
    name: str, collective: str, ranks: int, root: int = 0, hosts: tuple[int, ...] | None = None
) -> Schedule:
    """The algorithm over ``ranks`` ranks, on two hosts where it asks for hosts and none are given."""
    hosts = hosts or hosts_for(name, ranks)
    return algorithms.build(name, collective, ranks, root if collective in ROOTED else 0, hosts=hosts)


def takes_chunks(name: str, collective: str) -> bool:
    """Whether the number of chunks is the caller's choice."""
    return name in registry.single_level(collective) and registry.takes_chunks(name, collective)
