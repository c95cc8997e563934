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
from dtcomm.runtime.process_groups import group_store
from tests.support.rank_tests import on_ranks
from tests.support.stopwatch import Stopwatch

LIMIT_S = 2.0


def lose_rank_1(rank: int, world_size: int, operation: str) -> Any:
    """Kill rank 1 while the others wait for it."""
    group = dist.group.WORLD
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if operation == "product":
        dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    if operation == "recv":
        if rank == 0:
            dist.recv(torch.empty(1000), 1)
        elif rank == 1:
            dist.send(tensor, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    watch = Stopwatch()
    with pytest.raises(PeerLost, match="rank 1") as error:
        for _ in range(3):
            if operation == "all_reduce":
                dist.all_reduce(tensor)
            elif operation == "async":
                dist.all_reduce(tensor, async_op=True).wait()
            elif operation == "product":
                dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
            elif operation == "recv":
                dist.recv(tensor, 1)
            else:
                dist.barrier(group)
    return watch.elapsed(), str(error.value)


@pytest.mark.parametrize("operation", ["all_reduce", "async", "product", "recv", "barrier"])
def test_dead_rank_is_named_within_two_seconds(operation: str) -> None:
    with spawn_ranks(lose_rank_1, 2, operation, backend="dtcomm") as ranks:
        pid = ranks.pids[1]
        outcome = ranks.join(30)[0]
    assert outcome.ok, str(outcome)
    elapsed, text = outcome.result  # type: ignore[misc]
    assert elapsed.within(cpu_s=LIMIT_S, wall_s=5 * LIMIT_S) and f"pid {pid}" in text, (elapsed, text)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> set[str]:
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


def create_and_destroy_groups(rank: int, world_size: int) -> list[int]:
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


def test_destroyed_groups_leak_no_descriptors() -> None:
    for counts in run_ranks(create_and_destroy_groups, 2, backend="dtcomm"):
        assert max(counts[2:]) <= counts[2] + 2, counts


@on_ranks(2, backend="dtcomm")
def test_timeouts_raise_collective_timeout(rank: int, world_size: int) -> None:
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


def report_fallbacks(rank: int, world_size: int) -> Any:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.PRODUCT)
    dist.all_reduce(torch.ones(4), dist.ReduceOp.PRODUCT)
    sparse = torch.eye(4).to_sparse()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.eye(4) * world_size)
    dist.all_reduce(torch.ones(4))
    return dtcomm.backend.report().groups, str(dtcomm.backend.report())


def test_the_report_names_fallbacks() -> None:
    for groups, text in run_ranks(report_fallbacks, 2, backend="dtcomm"):
        (group,) = groups
        assert {
            (fallback["operation"], fallback["reason"], fallback["backend"], fallback["count"])
            for fallback in group["fallbacks"]
        } == {("all_reduce", "op PRODUCT", "gloo", 2), ("all_reduce", "sparse_coo tensor", "gloo", 1)}
        assert "fallback to gloo: all_reduce, 2 times: op PRODUCT" in text


@on_ranks(2, backend="dtcomm")
def test_invalid_arguments_are_named(rank: int, world_size: int) -> None:
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


def count_keys_after_barriers(rank: int, world_size: int) -> list[int]:
    """Return the number of keys in the group's store after each of some barriers."""
    counts = []
    for _ in range(4):
        dist.monitored_barrier()
        dist.barrier()
        counts.append(group_store(dist.group.WORLD).num_keys() if rank == 0 else 0)
        dist.barrier()
    return counts


def test_monitored_barriers_leave_no_keys_behind() -> None:
    first, *others = run_ranks(count_keys_after_barriers, 2, backend="dtcomm")[0]
    assert others == [first] * 3
