"""Over Gloo, a rank that dies while others send to it is named within seconds, whatever the timeout."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm.errors import PeerLost
from dtcomm.launch.ranks import run_ranks, spawn_ranks
from tests.support.stopwatch import Elapsed, Stopwatch

GLOO = {"DTCOMM_RUNTIME": "process_group"}


def send_to_one_that_dies(rank: int, world_size: int, asynchronous: bool) -> tuple[list[str], Elapsed]:
    """Return the errors of the message and of the next calls. The last rank does not receive, and is killed."""
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=120))
    C.all_reduce(torch.ones(8), group=group)
    if rank == world_size - 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    watch = Stopwatch()
    errors = []
    tensor = torch.ones(1 << 20)
    if asynchronous:  # several in flight, with a callback
        works = [C.all_reduce(tensor.clone(), group=group, async_op=True) for _ in range(3)]
        future = works[0].get_future().then(lambda done: "succeeded" if not done.exception() else "failed")
        for work in works:
            with pytest.raises(PeerLost) as error:
                work.wait()
            errors.append(str(error.value))
        del future
    else:
        with pytest.raises(PeerLost) as error:
            C.broadcast(tensor, rank, group=group) if world_size == 2 else C.all_reduce(tensor, group=group)
        errors.append(str(error.value))
    with pytest.raises(PeerLost) as error:
        C.all_reduce(tensor, group=group)
    return [*errors, str(error.value)], watch.elapsed()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_dies_is_named_by_ranks_that_send_to_it(world_size: int, asynchronous: bool) -> None:
    with spawn_ranks(send_to_one_that_dies, world_size, asynchronous, env=GLOO) as ranks:
        pid = ranks.pids[world_size - 1]
        for outcome in ranks.join(60)[:-1]:
            assert outcome.ok, str(outcome)
            errors, elapsed = outcome.result
            for text in errors:
                assert text.startswith(f"rank {world_size - 1} (") and f"pid {pid}) is gone" in text, text
            assert elapsed.within(cpu_s=3.0, wall_s=15.0), elapsed


def sum_until_one_dies(rank: int, world_size: int, delay_s: float) -> tuple[str, Elapsed]:
    """Return the error of the first call that fails; another thread of rank 1 kills it as soon as it waits in Gloo."""
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=120))
    C.all_reduce(torch.ones(8), group=group)
    tensor = torch.ones(1 << 14)
    dist.barrier()
    if rank == 1:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(PeerLost) as error:
        while True:
            watch = Stopwatch()
            C.all_reduce(tensor, "avg", group=group)
    return str(error.value), watch.elapsed()


@pytest.mark.parametrize("attempt", range(4))
def test_a_rank_that_dies_while_it_waits_is_named(attempt: int) -> None:
    """Gloo does not always fail the message that it is writing when a connection ends: hence several attempts."""
    env = {**GLOO, "DTCOMM_CHECK": "1"}
    with spawn_ranks(sum_until_one_dies, 2, 0.002 * (attempt + 1), env=env) as ranks:
        pid = ranks.pids[1]
        outcome = ranks.join(30)[0]
    assert outcome.ok, str(outcome)
    text, elapsed = outcome.result
    assert text.startswith("rank 1 (") and f"pid {pid}) is gone" in text, text
    assert elapsed.within(cpu_s=2.0, wall_s=10.0), elapsed


def outlive_one_that_has_finished(rank: int, world_size: int) -> float:
    """Return the sum, which a rank computes slowly after another one has done its part and ended."""
    tensor = torch.full((1 << 20,), float(rank + 1))
    if rank == 1:
        time.sleep(1.5)
    if rank == 2:  # its last part: it sends, and its process ends as soon as it has received
        C.all_reduce(tensor)
        os._exit(0)
    C.all_reduce(tensor)
    return float(tensor[0])


def test_a_rank_that_ends_after_its_last_operation_harms_none() -> None:
    with spawn_ranks(outlive_one_that_has_finished, 3, env=GLOO) as ranks:
        outcomes = ranks.join(60)
        assert [outcome.result for outcome in outcomes[:2]] == [6.0, 6.0], outcomes


def leave_while_an_operation_waits(rank: int, world_size: int) -> list[str]:
    """Return what went wrong in threads while an operation of a group waited that rank 0 had destroyed."""
    problems: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: problems.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dtcomm").addHandler(handler)
    threading.excepthook = lambda raised: problems.append(repr(raised.exc_value))
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=60))
    C.all_reduce(torch.ones(8), group=group)
    work = C.all_reduce(torch.ones(1 << 14), group=group, async_op=True) if rank == 0 else None
    time.sleep(0.6 if rank == 0 else 2.0)
    dist.destroy_process_group()
    if work is not None:
        with pytest.raises(PeerLost):  # once rank 1 has left the group too
            work.wait()
    threading.excepthook = threading.__excepthook__
    return problems


def test_operations_of_a_destroyed_group_are_still_looked_at() -> None:
    for problems in run_ranks(leave_while_an_operation_waits, 2, env=GLOO, timeout=30):
        assert problems == []
