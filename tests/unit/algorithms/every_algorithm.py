"""Every algorithm of every collective, for tests that enumerate them."""

from __future__ import annotations

from dtcomm import algorithms
from dtcomm.schedule import Schedule
from dtcomm.schedule.ir import ROOTED

NAMES = [(c, name) for c in algorithms.collectives() for name in algorithms.available(c)]


def hosts_for(name: str, ranks: int) -> tuple[int, ...] | None:
    """Return two hosts of almost equal size for hierarchical algorithms, and None for the others."""
    if not name.startswith("hierarchical"):
        return None
    return (ranks - ranks // 2, ranks // 2) if ranks > 1 else (1,)


def build(
    name: str, collective: str, ranks: int, root: int = 0, hosts: tuple[int, ...] | None = None
) -> Schedule:
    """Build the algorithm's schedule; hierarchical ones run on two hosts by default."""
    hosts = hosts or hosts_for(name, ranks)
    return algorithms.build(name, collective, ranks, root if collective in ROOTED else 0, hosts=hosts)


def takes_chunks(name: str, collective: str) -> bool:
    """Return whether the caller may choose the number of chunks."""
    return name in algorithms.single_level(collective) and algorithms.takes_chunks(name, collective)
