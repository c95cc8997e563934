"""Lifetimes of groups, threads and communicators: what is kept while in use, and what is released afterwards."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks


@on_ranks(4)
def test_overlapping_subgroups_run_at_once(rank: int, n: int) -> None:
    world = torch.tensor([float(rank)])
    subgroups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [3, 1, 0])]
    mine = [group for group in subgroups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    for _ in range(5):
        works = []
        for group in mine:
            tensor = torch.full((5000,), float(rank + 1))
            works.append((group, tensor, collectives.all_reduce(tensor, group=group, async_op=True)))
        collectives.all_reduce(world)
        for group, tensor, work in works:
            work.wait()
            members = dist.get_process_group_ranks(group)
            assert torch.equal(tensor, torch.full((5000,), float(sum(member + 1 for member in members))))
    outside = next(group for group in subgroups if group not in mine)
    with pytest.raises(ValueError, match="group"):
        collectives.all_reduce(torch.ones(1), group=outside)
    pair = mine[0]
    members = dist.get_process_group_ranks(pair)
    tensor = torch.tensor([float(rank)])
    collectives.broadcast(tensor, src=members[1], group=pair)
    assert tensor.item() == members[1]
    stranger = next(r for r in range(n) if r not in members)
    with pytest.raises(ValueError, match=rf"src: rank {stranger} is not in the group; its ranks are"):
        collectives.broadcast(tensor, src=stranger, group=pair)
    dist.barrier()
    dist.destroy_process_group(pair)
    with pytest.raises(ValueError, match="destroyed"):
        collectives.all_reduce(tensor, group=pair)


@on_ranks(2)
def test_completed_operations_release_their_tensors(rank: int, n: int) -> None:
    """A completed operation holds no tensor, whichever way its completion was observed."""
    observers: list[Callable[[Any], Any]] = [
        lambda work: work.wait(),
        lambda work: work.get_future().wait(),
        lambda work: [None for _ in iter(work.is_completed, True)],
    ]
    for observe in observers:
        tensor = torch.ones(1000)
        reference = weakref.ref(tensor)
        work = collectives.all_reduce(tensor, async_op=True)
        observe(work)
        del work, tensor
        deadline = time.monotonic() + 5  # the thread of futures may still be at its last line
        while reference() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert reference() is None


@on_ranks(2)
def test_a_closed_communicator_holds_no_tensor_of_an_operation_that_nobody_waited_for(
    rank: int, n: int
) -> None:
    collectives.all_reduce(torch.ones(1))  # connects the ranks
    tensors = [torch.ones(1000) for _ in range(3)]
    references = [weakref.ref(tensor) for tensor in tensors]
    for tensor in tensors:
        collectives.all_reduce(tensor, async_op=True)
    del tensor, tensors
    collectives.all_reduce(torch.ones(1))  # operations of a group end in the order of their start
    collectives.release()
    assert [reference() for reference in references] == [None] * 3


@on_ranks(2)
def test_threads_of_a_process_use_different_groups(rank: int, n: int) -> None:
    """Threads of one process may use different groups at once."""
    thread_groups = [dist.new_group(list(range(n))) for _ in range(3)]
    failures: list[BaseException] = []

    def work(group: dist.ProcessGroup) -> None:
        try:
            for i in range(50):
                tensor = torch.full((100 * i + 1,), 1.0)
                collectives.all_reduce(tensor, group=group)
                assert tensor.eq(n).all()
        except BaseException as error:
            failures.append(error)

    for group in thread_groups:  # all ranks create communicators in the same order
        collectives.all_reduce(torch.ones(1), group=group)
    running = [threading.Thread(target=work, args=(group,)) for group in thread_groups]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures


def create_and_release(rank: int, n: int) -> tuple[list[int], list[int]]:
    counts = []
    for i in range(60):
        tensor = torch.ones(10 + i)
        work = collectives.all_reduce(tensor, async_op=True)
        work.get_future().wait()
        collectives.release()
        if i in (9, 59):
            dist.barrier()
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), _mappings()))
    return counts


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("dtcomm")


def shared_memory_names() -> set[str]:
    """Return the names in shared memory; other programs of the machine add and remove some."""
    return {name for name in os.listdir("/dev/shm") if "dtcomm" in name}


def test_released_communicators_leak_nothing() -> None:
    shm = shared_memory_names()
    for early, late in run_ranks(create_and_release, 2):
        assert late == early, "descriptors, threads or mappings grow with the rounds"
    assert shared_memory_names() <= shm
