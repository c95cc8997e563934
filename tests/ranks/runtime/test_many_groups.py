"""Many groups in one process: their descriptors, waiting in all of them at once, and closing them together."""

from __future__ import annotations

import os
import statistics
import time

import pytest
import torch
import torch.distributed as dist

import dtcomm
from dtcomm.launch.ranks import run_ranks
from tests.support.ucx import requires_ucx

LARGE = 16 * 2**20  # elements: more than the connections to a rank that does not read can hold


def new_groups(number: int, ranks: int) -> list[dist.ProcessGroup]:
    groups = [dist.new_group(list(range(ranks))) for _ in range(number)]
    for group in groups:
        dtcomm.all_reduce(torch.ones(10), group=group)
    return groups


def descriptors() -> int:
    """The descriptors that dtcomm holds for groups of ranks that share memory."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the one that lists the folder
            continue
    return sum("pidfd" in name or "memfd:dtcomm" in name for name in names)


def count_descriptors(rank: int, ranks: int) -> tuple[int, int]:
    kept = new_groups(1, ranks)
    one = descriptors()
    kept += new_groups(19, ranks)
    twenty = descriptors()
    dist.barrier()
    return one, twenty


@pytest.mark.parametrize("ranks", [2, 4])
def test_descriptors_of_a_group_do_not_grow_with_its_ranks(ranks: int) -> None:
    for one, twenty in run_ranks(count_descriptors, ranks):
        assert twenty - one == 19, "only the group's own memory"


def answer_while_waiting_in_all(rank: int, ranks: int, number: int, pairs: int) -> tuple[float, float]:
    """Seconds until rank 0, which waits in all groups, answers in the first and in the last ones."""
    groups = new_groups(number, ranks)
    tensors = [torch.ones(4096) for _ in groups]

    def all_reduce(index: int, async_op: bool = False) -> dtcomm.Work | None:
        # In two shots, rank 1 needs an answer of rank 0.
        return dtcomm.all_reduce(tensors[index], group=groups[index], algorithm="two_shot", async_op=async_op)

    works = [all_reduce(index, async_op=True) for index in range(number)] if rank == 0 else []
    dist.barrier()
    times: dict[int, float] = {}
    if rank == 1:
        order = [index for pair in range(pairs) for index in (1 + pair, number - 1 - pair)]
        for index in order:
            time.sleep(0.05)  # until rank 0 sleeps
            began = time.perf_counter()
            all_reduce(index)
            times[index] = time.perf_counter() - began
        for index in range(number):
            if index not in times:
                all_reduce(index)
    for work in works:
        assert work is not None
        work.wait()
    assert all(tensor.eq(2).all() for tensor in tensors)
    if rank == 0:
        return 0.0, 0.0
    halves = [index for index in times if index <= pairs], [index for index in times if index > pairs]
    first, last = (statistics.median(times[index] for index in half) for half in halves)
    return first, last


@pytest.mark.parametrize("transport", ["memory", "sockets"])
@pytest.mark.slow
def test_all_groups_answer_equally_fast_while_100_wait(transport: str) -> None:
    _, (first, last) = run_ranks(answer_while_waiting_in_all, 2, 100, 15, env={"DTCOMM_TRANSPORT": transport})
    assert last < 3 * first + 5e-3, "the last groups are only looked at every 20 ms"


def close_with_unsent_data(rank: int, ranks: int, number: int) -> float:
    groups = new_groups(number, ranks)
    dist.barrier()
    if rank == 1:
        return 0.0  # reads nothing until rank 0 has returned
    tensors = [torch.ones(LARGE) for _ in groups]
    for group, tensor in zip(groups, tensors, strict=True):
        dtcomm.all_reduce(tensor, group=group, async_op=True)
    time.sleep(0.5)  # until the connections are full
    del group, groups
    began = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - began


@pytest.mark.parametrize("transport", ["sockets", pytest.param("ucx", marks=requires_ucx)])
def test_groups_whose_data_does_not_arrive_are_closed_in_the_time_of_one(transport: str) -> None:
    seconds, _ = run_ranks(close_with_unsent_data, 2, 4, env={"DTCOMM_TRANSPORT": transport})
    assert seconds < 4, "2 s for each group"
