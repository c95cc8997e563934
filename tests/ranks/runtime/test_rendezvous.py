"""The rendezvous, in which the ranks of a group make a communicator: deadlines, failures and several groups at once."""

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm.errors import CollectiveTimeout, DtcommError
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
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


def wait_in_two_threads(rank: int, world_size: int) -> list[tuple[str, bool]]:
    """Return what two threads of rank 0 raise and whether both end soon after the timeout of 1 s."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
    dist.barrier()
    results: list[tuple[str, bool]] = []

    def wait() -> None:
        watch = Stopwatch()
        with pytest.raises(CollectiveTimeout) as error:
            C.barrier(group=group)
        results.append((str(error.value), watch.elapsed().within(cpu_s=1.0, wall_s=1.9)))

    if rank == 0:
        threads = [in_thread(wait) for _ in range(2)]
        for thread in threads:
            thread.join()
    dist.barrier()
    return results


def test_one_deadline_for_all_ranks_and_threads() -> None:
    results = run_ranks(wait_in_two_threads, 3)[0]
    assert [soon for _, soon in results] == [True, True]
    assert "ranks 1 and 2 did not come" in results[0][0] and "timeout of 1 s" in results[0][0], results


def lose_the_store(rank: int, world_size: int, directory: Path, before: bool) -> str:
    init_with_tcp_store(rank, world_size, directory, 60.0)
    dist.barrier()
    send_to_parent("ready")
    if rank == 0:
        time.sleep(60)
    while before and accepts_connections(int((directory / "port").read_text())):
        time.sleep(0.01)
    with pytest.raises(DtcommError) as error:
        C.barrier()
    return f"{type(error.value).__name__}: {error.value}"


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("before", [True, False])
def test_error_of_the_store_is_reported_as_such(tmp_path: Path, before: bool) -> None:
    with spawn_ranks(lose_the_store, 2, tmp_path, before, backend=None) as ranks:
        assert [ranks.receive(rank) for rank in range(2)] == ["ready", "ready"]
        time.sleep(0.0 if before else 0.2)
        ranks.kill(0)
        outcome = ranks.join(30)[1]
    assert outcome.ok and outcome.result.startswith("DtcommError: the group's store"), outcome
