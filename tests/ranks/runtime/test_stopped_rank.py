"""A rank that was stopped or interrupted, while it waited for others or they for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dtcomm
import dtcomm.collectives as C
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from dtcomm.work import TorchWork
from tests.support.ucx import requires_ucx

TIMEOUT_S = 2.0


def reduce(tensor: torch.Tensor) -> None:
    C.all_reduce(tensor, algorithm="one_shot")


def seen(rank: int) -> dict[str, Any]:
    """What this rank sees of ``rank``."""
    (communicator,) = dtcomm.flight_record()["communicators"]
    return communicator["seen"][rank]


def stop_the_other(rank: int, world_size: int) -> None:
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    tensor = torch.ones(10)
    reduce(tensor)
    if rank == 1:
        number = seen(1)["last"] + 1
        while seen(0)["last"] != number or seen(0)["waiting_for"] != 1:
            time.sleep(0.001)
        os.kill(pids[0], signal.SIGSTOP)
    reduce(tensor)  # rank 0 has sent its part
    if rank == 1:
        time.sleep(TIMEOUT_S + 0.1)
        os.kill(pids[0], signal.SIGCONT)
    send_to_parent(tensor.tolist())


def test_rank_that_was_stopped_finds_what_arrived_meanwhile() -> None:
    with spawn_ranks(stop_the_other, 2, group_timeout=TIMEOUT_S) as ranks:
        assert [ranks.receive(rank) for rank in range(2)] == [[4.0] * 10] * 2
        assert all(outcome.ok for outcome in ranks.join())


PIECE = 1 << 18  # elements: UCX sends so many in a message for which the receiver has to ask


def exchange(tensor: torch.Tensor, world_size: int) -> None:
    C.all_to_all(torch.empty(world_size * PIECE), tensor)


def lose_rank_1_while_rank_2_is_stopped(rank: int, world_size: int, transport: str) -> None:
    os.environ.update({"DTCOMM_HOST_ID": f"host {rank}", "DTCOMM_TRANSPORT": transport})
    tensor = torch.ones(world_size * PIECE)
    exchange(tensor, world_size)
    dist.barrier()  # UCX needs the sender until the receiver has a message, so rank 2 must not stop before
    send_to_parent(os.getpid())
    if rank == 1:
        signal.pause()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        exchange(tensor, world_size)
    except DtcommError as error:
        C.release()
        send_to_parent(str(error))


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("transport", ["sockets", pytest.param("ucx", marks=requires_ucx)])
def test_rank_that_was_stopped_names_the_lost_rank_and_not_the_one_that_reported_it(transport: str) -> None:
    """Rank 0 closes before what it has sent to rank 2 has arrived, so only its failure says what happened."""
    with spawn_ranks(lose_rank_1_while_rank_2_is_stopped, 3, transport) as ranks:
        pids = [ranks.receive(rank) for rank in range(3)]
        while not is_stopped(pids[2]):
            time.sleep(0.01)
        time.sleep(0.2)  # rank 0 has sent what it sends
        os.kill(pids[1], signal.SIGKILL)
        texts = [ranks.receive(0)]
        os.kill(pids[2], signal.SIGCONT)
        texts.append(ranks.receive(2))
        assert all(text.startswith("rank 1 (") and f"pid {pids[1]}" in text for text in texts), texts


def reduce_in_vain(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    with pytest.raises(DtcommError):
        C.all_reduce(tensor, group=group)


def interrupt_rank_0(rank: int, world_size: int, cases: list[str]) -> list[tuple[str, str, float]]:
    """Ranks 0 and 1 wait for rank 2, which does not come, and rank 0 gets Ctrl-C; what each of the two raises."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raised = []
    for case in cases:
        group, tensor = dist.new_group(timeout=timedelta(seconds=20)), torch.ones(100_000)
        if case not in ("connecting", "deferred"):
            C.all_reduce(tensor, group=group)
        if case == "ddp":
            model = DistributedDataParallel(torch.nn.Linear(300, 300), process_group=group)
            dtcomm.ddp.compress(model)
            for _ in range(3):  # the second forward pass rebuilds the buckets
                model(torch.ones(1, 300)).sum().backward()
        dist.barrier()
        if case == "handler":
            signal.signal(signal.SIGINT, lambda *_: C.all_reduce(tensor, group=group))  # noqa: B023
        if rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        if rank < 2 and case == "two threads":  # the other one drives the engine, and this one sleeps
            threading.Thread(target=reduce_in_vain, args=[tensor.clone(), group]).start()
            time.sleep(0.1)
        try:
            if rank < 2 and case in ("deferred", "wait"):
                C.all_reduce(tensor, group=group, async_op=True).wait()
            elif rank < 2 and case == "limit":
                work = C.all_reduce(tensor, group=group, async_op=True)
                TorchWork(work, [tensor]).wait(timedelta(seconds=20))
            elif rank < 2 and case == "ddp":
                model(torch.ones(1, 300)).sum().backward()
            elif rank < 2:
                C.all_reduce(tensor, group=group)
        except BaseException as error:
            raised.append((type(error).__name__, str(error), time.monotonic() - begin))
        dist.barrier()
    return raised


@pytest.mark.parametrize(
    "environment",
    [
        {"DTCOMM_TRANSPORT": "memory"},
        {"DTCOMM_TRANSPORT": "sockets"},
        {"DTCOMM_RUNTIME": "process_group"},
        pytest.param({"DTCOMM_TRANSPORT": "ucx"}, marks=requires_ucx),
    ],
    ids=lambda environment: next(iter(environment.values())),
)
def test_an_interrupt_ends_the_wait_and_is_told_to_the_others(environment: dict[str, str]) -> None:
    cases = ["connecting", "deferred", "blocking", "wait", "limit", "ddp", "two threads"]
    if "DTCOMM_TRANSPORT" in environment:  # over Gloo the handler's call waits until the timeout
        cases.append("handler")
    interrupted, told, late = run_ranks(interrupt_rank_0, 3, cases, env=environment, fresh=True)
    expected = ["DtcommError" if case == "handler" else "KeyboardInterrupt" for case in cases]
    assert [name for name, _, _ in interrupted] == expected, interrupted
    assert [name for name, _, _ in told] == ["DtcommError"] * len(cases) and not late, told
    assert all(text.startswith("rank 0 ") and "interrupt" in text.lower() for _, text, _ in told), told
    assert all(seconds < 10 for _, _, seconds in interrupted + told)


def interrupt_a_receive(rank: int, world_size: int, sources: list[int | None]) -> list[tuple[str, str]]:
    """Interrupt rank 0 while it receives; rank 1 sends to it afterwards. Return what each receive or send raised."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raised = []
    for source in sources:
        group = dist.new_group(timeout=timedelta(seconds=30))
        tensor = torch.ones(4_000_000)  # more than is written before the receiver has to come
        (dist.recv if rank == 0 else dist.send)(tensor, 1 - rank, group=group)
        if rank == 0:
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt) as interrupt:
                dist.recv(tensor, source, group=group)
            timer.join()
            raised.append((interrupt.type.__name__, str(interrupt.value)))
        dist.barrier()
        if rank == 1:
            with pytest.raises(DtcommError) as told:
                dist.send(tensor, 0, group=group)
            raised.append((told.type.__name__, str(told.value)))
    return raised


def test_an_interrupt_of_a_receive_is_told_to_the_senders() -> None:
    _, told = run_ranks(interrupt_a_receive, 2, [1, None], backend="dtcomm", fresh=True)
    assert len(told) == 2 and all("rank 0 " in text and "interrupt" in text for _, text in told), told
