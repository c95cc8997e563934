"""How many cores a rank of the native engine has, and with how many threads it works."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from dtcomm import env

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return the cores this process may use, from its affinity and the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def local_ranks(ranks: int, world_size: int) -> int:
    """Return how many ranks this host has at least, as far as a rank knows it by itself.

    Args:
        ranks: The ranks of the communicator.
        world_size: All ranks of the job.
    """
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    if value.isdecimal():
        return int(value)
    return world_size if ranks < world_size else 1


def cores_per_rank(affinities: Sequence[Collection[int]], ranks: int, machine: int) -> float:
    """Return how many cores a rank of a host has for itself; less than 1 where ranks take turns.

    The ranks of a communicator do not know where the others of the host may run. Where their own cores overlap, the
    others are assumed to run on the same ones, and where they do not, to have cores of their own.

    Args:
        affinities: The cores that each rank of the communicator on this host may run on.
        ranks: All ranks of the host, also those of other communicators.
        machine: All cores of the host.

    Example:
        Two of four ranks on a machine with two cores::

            assert cores_per_rank([{0, 1}, {0, 1}], ranks=4, machine=2) == 0.5
    """
    cores = len(set[int]().union(*affinities))
    overlap = sum(map(len, affinities)) > cores
    return min(cores / (max(ranks, len(affinities)) if overlap else len(affinities)), machine / ranks)


def threads_per_rank(affinities: Sequence[Collection[int]], usable: int, ranks: int) -> int:
    """Return with how many threads a rank of a host works.

    Args:
        affinities: The cores that each rank of the communicator on this host may run on.
        usable: The cores that they may use together, as far as a CPU quota limits them.
        ranks: All ranks of the host, also those of other communicators.
    """
    chosen = int(env.get("DTCOMM_THREADS"))
    if chosen:
        return chosen
    cores = min(usable, len(set[int]().union(*affinities)))
    return max(1, min(cores // ranks, *map(len, affinities)))
