"""monitored_barrier: a barrier that says which ranks do not come, for finding out why a program hangs.

It goes through the store alone, so that it works where nothing else does; rank 0 hears all ranks and answers.
"""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm.errors import CollectiveTimeout

_PAUSE_S = 0.002  # between two looks


def install() -> None:
    """torch refuses the function for all backends but Gloo by name: let groups of ours through."""
    original: Any = c10d.monitored_barrier
    if hasattr(original, "dtcomm"):
        return

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        chosen: Any = c10d._get_default_group() if group is None else group
        if chosen is dist.GroupMember.NON_GROUP_MEMBER or not hasattr(chosen, "monitored_barrier_of_dtcomm"):
            original(group, timeout, wait_all_ranks)
            return
        given = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        if given is not None:
            c10d._check_valid_timeout(given)
        chosen.monitored_barrier(given, wait_all_ranks)

    monitored_barrier.dtcomm = True  # type: ignore[attr-defined]
    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def barrier(group: Any, store: c10d.Store, number: int, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Raises CollectiveTimeout on rank 0, naming one missing rank, or all with ``wait_all_ranks``, and on those that
    came. ``number`` counts the group's calls.
    """
    rank, size, ranks = group.rank(), group.size(), dist.get_process_group_ranks(group)
    prefix = f"dtcomm/monitored/{number}"
    limit = f"{timeout.total_seconds() * 1000:.0f} ms"
    deadline = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        store.set(f"{prefix}/{rank}", "1")
        while not store.check([f"{prefix}/answer"]):
            if time.monotonic() >= deadline + 1.0:  # rank 0 may only just have found out
                raise CollectiveTimeout(
                    f"Rank {ranks[rank]} successfully reached monitoredBarrier, but received errors while waiting "
                    f"for send/recv from rank {ranks[0]}, which did not answer within {limit}"
                )
            time.sleep(_PAUSE_S)
        answer = store.get(f"{prefix}/answer").decode()
        store.set(f"{prefix}/{rank}/read", "1")
        if answer != "all":
            raise CollectiveTimeout(
                f"Rank {ranks[rank]} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank {ranks[0]}. Please check rank {ranks[0]}'s logs for faulty rank. "
                f"It says: {answer}"
            )
        return
    if timeout <= timedelta(0):
        raise CollectiveTimeout(
            f"[Rank {ranks[0]}]: Rank {ranks[0]} timed out in monitoredBarrier after {limit}"
        )
    missing = list(range(1, size))
    while missing:
        missing = [each for each in missing if not store.check([f"{prefix}/{each}"])]
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(_PAUSE_S)
    if missing:
        named = ", ".join(str(ranks[each]) for each in (missing if wait_all_ranks else missing[:1]))
        ending = "s" if wait_all_ranks and len(missing) > 1 else ""
        said = f"[Rank {ranks[0]}]: Rank{ending} {named} failed to pass monitoredBarrier in {limit}"
        store.set(f"{prefix}/answer", said)
        raise CollectiveTimeout(said)
    store.set(f"{prefix}/answer", "all")
