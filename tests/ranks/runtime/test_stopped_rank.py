"""A rank that was stopped for longer than its timeout, while what it waited for arrived."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
import dtcomm.collectives as C
from dtcomm.launch.ranks import send_to_parent, spawn_ranks

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
