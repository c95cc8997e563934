"""`monitored_barrier`: a barrier that names the ranks that do not arrive, to find out why a program hangs.

It uses only the store, so that it works when nothing else does. Rank 0 collects all arrivals and answers.
"""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm.errors import CollectiveTimeout

_POLL_S = 0.002  # pause between two polls of the store


def install() -> None:
    """Make torch's function accept groups of this backend; torch rejects all backends except Gloo by name."""
    original: Any = c10d.monitored_barrier
    if hasattr(original, "dtcomm"):
        return

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        target: Any = c10d._get_default_group() if group is None else group
        if target is dist.GroupMember.NON_GROUP_MEMBER or not hasattr(target, "dtcomm_monitored_barrier"):
            original(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        if limit is not None:
            c10d._check_valid_timeout(limit)
        target.monitored_barrier(limit, wait_all_ranks)

    monitored_barrier.dtcomm = True  # type: ignore[attr-defined]
    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def barrier(group: Any, store: c10d.Store, number: int, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait until all ranks of the group have called this.

    Args:
        group: The process group.
        store: Its store.
        number: The number of the group's barriers so far, which keeps their keys apart.
        timeout: How long rank 0 waits.
        wait_all_ranks: Name all missing ranks instead of the first one.

    Raises:
        CollectiveTimeout: Ranks are missing; raised on rank 0, which names them, and on the ranks that arrived.
    """
    rank, size, ranks = group.rank(), group.size(), dist.get_process_group_ranks(group)
    prefix = f"dtcomm/monitored/{number}"
    limit = f"{timeout.total_seconds() * 1000:.0f} ms"
    deadline = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        store.set(f"{prefix}/{rank}", "1")
        while not store.check([f"{prefix}/answer"]):
            if time.monotonic() >= deadline + 1.0:  # rank 0 may have timed out just now
                raise CollectiveTimeout(
                    f"Rank {ranks[rank]} successfully reached monitoredBarrier, but received errors while waiting "
                    f"for send/recv from rank {ranks[0]}, which did not answer within {limit}"
                )
            time.sleep(_POLL_S)
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
        missing = [peer for peer in missing if not store.check([f"{prefix}/{peer}"])]
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if missing:
        named = missing if wait_all_ranks else missing[:1]
        names = ", ".join(str(ranks[peer]) for peer in named)
        plural = "s" if len(named) > 1 else ""
        message = f"[Rank {ranks[0]}]: Rank{plural} {names} failed to pass monitoredBarrier in {limit}"
        store.set(f"{prefix}/answer", message)
        raise CollectiveTimeout(message)
    store.set(f"{prefix}/answer", "all")
