"""Failures: ranks that die or do not arrive, wrong arguments, and leaked resources."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm
from dtcomm.errors import CollectiveTimeout, PeerLost
from dtcomm.launch.ranks import run_ranks, spawn_ranks
from dtcomm.launch.worker import send_to_parent
from tests.support.stopwatch import Stopwatch

LIMIT_S = 2.0


def lose(rank: int, world_size: int, doing: str) -> Any:
    """Kill rank 1 while the others wait for it."""
    group = dist.group.WORLD
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if doing == "product":
        dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    if doing == "recv":
        if rank == 0:
            dist.recv(torch.empty(1000), 1)
        elif rank == 1:
            dist.send(tensor, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    watch = Stopwatch()
    with pytest.raises(PeerLost, match="rank 1") as error:
        for _ in range(3):
            if doing == "all_reduce":
                dist.all_reduce(tensor)
            elif doing == "async":
                dist.all_reduce(tensor, async_op=True).wait()
            elif doing == "product":
                dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
            elif doing == "recv":
                dist.recv(tensor, 1)
            else:
                dist.barrier(group)
    return watch.elapsed(), str(error.value)


@pytest.mark.parametrize("doing", ["all_reduce", "async", "product", "recv", "barrier"])
def test_a_rank_that_dies_is_named_within_two_seconds(doing: str) -> None:
    with spawn_ranks(lose, 2, doing, backend="dtcomm") as ranks:
        pid = ranks.pids[1]
        outcome = ranks.join(30)[0]
    assert outcome.ok, outcome.traceback
    elapsed, text = outcome.result  # type: ignore[misc]
    assert elapsed.within(cpu_s=LIMIT_S, wall_s=5 * LIMIT_S) and f"pid {pid}" in text, (elapsed, text)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> set[str]:
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


def groups_come_and_go(rank: int, world_size: int) -> list[int]:
    """Return the number of file descriptors after each round of creating, using and destroying groups."""
    counts = []
    for _ in range(6):
        for _ in range(3):
            group = dist.new_group(list(range(world_size)))
            dist.all_reduce(torch.ones(3), group=group)
            dist.all_reduce(torch.ones(3), dist.ReduceOp.PRODUCT, group=group)  # a Gloo fallback
            works = [
                dist.isend(torch.ones(2), 1 - rank, group=group),
                dist.irecv(torch.empty(2), 1 - rank, group=group),
            ]
            for work in works:
                work.wait()
            dist.destroy_process_group(group)
        dist.barrier()
        counts.append(_descriptors())
    send_to_parent(os.getpid())
    return counts


def test_destroyed_groups_leave_nothing_behind() -> None:
    for counts in run_ranks(groups_come_and_go, 2, backend="dtcomm"):
        assert max(counts[2:]) <= counts[2] + 2, counts


def timeouts(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        watch = Stopwatch()
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(CollectiveTimeout):
            work.wait(timedelta(seconds=0.3))
        elapsed = watch.elapsed()
        assert elapsed.wall_s > 0.2 and elapsed.within(cpu_s=2, wall_s=10), elapsed
        with pytest.raises(CollectiveTimeout, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
    else:
        time.sleep(0.6)
        dist.all_reduce(torch.ones(1))
        with pytest.raises(CollectiveTimeout, match="Rank 1 successfully reached monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
    dist.monitored_barrier(wait_all_ranks=True)


def test_timeouts() -> None:
    run_ranks(timeouts, 2, backend="dtcomm")


def reported(rank: int, world_size: int) -> Any:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.PRODUCT)
    dist.all_reduce(torch.ones(4), dist.ReduceOp.PRODUCT)
    sparse = torch.eye(4).to_sparse()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.eye(4) * world_size)
    dist.all_reduce(torch.ones(4))
    return dtcomm.backend.report().groups, str(dtcomm.backend.report())


def test_the_report_names_fallbacks() -> None:
    for groups, text in run_ranks(reported, 2, backend="dtcomm"):
        (group,) = groups
        assert {
            (fallback["operation"], fallback["reason"], fallback["backend"], fallback["count"])
            for fallback in group["fallbacks"]
        } == {
            ("all_reduce", "op PRODUCT", "gloo", 2),
            ("all_reduce", "sparse_coo tensor", "gloo", 1),
        }
        assert "fallback to gloo: all_reduce, 2 times: op PRODUCT" in text


def refused(rank: int, world_size: int) -> None:
    """Wrong arguments are named in the error, and the group still works."""
    with pytest.raises(ValueError, match="output_tensors has 1 tensors, the group 2 ranks"):
        dist.all_gather([torch.empty(2)], torch.ones(2))
    with pytest.raises(ValueError, match=r"input_tensors\[1\] has 3 elements, expected 2"):
        dist.reduce_scatter(torch.empty(2), [torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match="pg_options"):
        dist.new_group(pg_options=object())
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2


def test_wrong_arguments() -> None:
    run_ranks(refused, 2, backend="dtcomm")
