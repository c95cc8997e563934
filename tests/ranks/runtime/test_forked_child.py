"""What a forked child of a rank may do with what it inherits: it is not a rank."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm
import dtcomm.collectives as C
from dtcomm import _C
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.communicator import Communicator, existing_communicator
from tests.support.ucx import requires_ucx


def status_of_child(task: Callable[[], None]) -> int:
    """The exit code of a forked child that runs ``task``; negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            task()
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def record_in_child(rank: int, world_size: int) -> int:
    C.all_reduce(torch.ones(10))

    def check() -> None:
        assert dtcomm.flight_record()["communicators"] == []

    status = status_of_child(check)
    assert dtcomm.flight_record()["communicators"]
    C.all_reduce(torch.ones(10))
    return status


@pytest.mark.parametrize("transport", ["memory", "sockets", pytest.param("ucx", marks=requires_ucx)])
def test_flight_record_of_a_child_has_none_of_its_parents_groups(transport: str) -> None:
    assert run_ranks(record_in_child, 2, env={"DTCOMM_TRANSPORT": transport}) == [0, 0]


def list_in_child(rank: int, world_size: int) -> int:
    natives = [
        _C.NativeCommunicator(
            rank=rank, ranks=2, max_boxes=8, slot_bytes=64 * 1024, timeout_s=10.0, yield_us=50.0
        )
        for rank in range(2)
    ]
    addresses = [_C.Address(**native.address()) for native in natives]
    for native in natives:
        native.attach(addresses)
    assert len(natives[0].peer_snapshots()) == 2

    def check() -> None:
        assert natives[0].peer_snapshots() == natives[0].flight_records() == []
        natives[0].close()

    status = status_of_child(check)
    for native in natives:
        native.close()
        assert native.peer_snapshots() == []
    return status


def test_native_communicator_lists_nothing_in_a_child_or_after_close() -> None:
    assert run_ranks(list_in_child, 1) == [0]


def read_tensor_in_child(rank: int, world_size: int) -> int:
    tensor = C.empty(300_000)  # large enough to start inside its memory
    tensor.fill_(rank + 1.0)
    small = C.empty(10).fill_(5.0)
    C.all_reduce(tensor)

    def use() -> None:
        nonlocal small
        assert tensor.eq(3).all() and small.eq(5).all()
        mine = C.empty(10).fill_(6.0)
        del small  # leaves the child's own tensors alone
        assert mine.eq(6).all()
        tensor[0] = 7.0

    status = status_of_child(use)
    assert tensor[0] == 7 and small.eq(5).all(), "the child shares the memory"
    tensor.fill_(1.0)
    C.all_reduce(tensor)
    assert tensor.eq(2).all()
    return status


def test_child_reads_tensors_in_shared_memory() -> None:
    assert run_ranks(read_tensor_in_child, 2) == [0, 0]


def close_in_children(rank: int, world_size: int, children: int) -> list[str]:
    """The outcome of children that are forked while a thread uses the locks of the communicator that they close."""
    tensors = [torch.ones(10) for _ in range(3)]
    C.all_reduce(tensors[0])
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["forked"])
    works = [C.all_reduce(tensor, async_op=True) for tensor in tensors]
    threads = [threading.Thread(target=work.wait) for work in works]  # one drives, the others wait
    for thread in threads:
        thread.start()
    outcomes = []
    if rank == 0:
        communicator = existing_communicator(dist.group.WORLD)
        assert communicator is not None
        time.sleep(0.1)  # until all threads wait
        outcomes = [outcome_of_child(communicator, works) for _ in range(children)]
        store.set("forked", "")
    for thread in threads:
        thread.join()
    return outcomes


def outcome_of_child(communicator: Communicator, works: list[Any]) -> str:
    child = os.fork()
    if child == 0:
        try:
            communicator.close()
            with pytest.raises(DtcommError, match="forked"):
                works[0].wait()
            works.clear()
            gc.collect()
            C.release()
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


@pytest.mark.slow
def test_child_closes_a_communicator_whose_locks_are_held() -> None:
    # A thread that spins takes the lock of the queue at each look.
    outcomes, _ = run_ranks(close_in_children, 2, 50, env={"DTCOMM_SPINS": "1000000000"}, timeout=600)
    assert outcomes == ["0"] * 50
