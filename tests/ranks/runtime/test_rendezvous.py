"""The rendezvous, in which the ranks of a group make a communicator: deadlines, failures and several groups at once."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm.launch.ranks import run_ranks
from tests.support.stopwatch import Stopwatch


def init_with_tcp_store(rank: int, world_size: int, directory: Path, timeout_s: float) -> None:
    """Initialize the default group with a TCPStore on rank 0."""
    file = directory / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        (directory / "draft").write_text(str(store.port))
        os.replace(directory / "draft", file)
    else:
        while not file.exists():
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(file.read_text()), world_size, is_master=False)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def use_two_groups(rank: int, world_size: int, directory: Path) -> bool:
    init_with_tcp_store(rank, world_size, directory, 60.0)
    first, second = (dist.new_group([0, 1]) for _ in range(2))
    dist.barrier()
    watch = Stopwatch()
    if rank == 0:
        waiting = in_thread(lambda: C.barrier(group=first))
        time.sleep(0.1)  # the thread waits for rank 1
        C.barrier(group=second)
        waiting.join()
    else:
        C.barrier(group=second)
        C.barrier(group=first)
    elapsed = watch.elapsed()
    dist.barrier()  # rank 0 has the store
    return elapsed.within(cpu_s=2.0, wall_s=20.0)


def test_groups_do_not_wait_for_each_other(tmp_path: Path) -> None:
    assert run_ranks(use_two_groups, 2, tmp_path, backend=None) == [True, True]
