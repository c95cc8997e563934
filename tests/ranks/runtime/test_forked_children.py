"""Processes that a rank forks: what they inherit does not crash them."""

from __future__ import annotations

import os

import torch

import dtcomm
from dtcomm.launch.ranks import run_ranks


def record_in_a_child(rank: int, world_size: int) -> tuple[int, int]:
    """Return the wait status of a child that makes a flight record, and the number of groups in this rank's record."""
    dtcomm.all_reduce(torch.ones(1000))
    child = os.fork()
    if child == 0:
        os._exit(len(dtcomm.flight_record()["communicators"]))
    _, status = os.waitpid(child, 0)
    return status, len(dtcomm.flight_record()["communicators"])


def test_a_forked_child_can_make_a_flight_record() -> None:
    assert run_ranks(record_in_a_child, 2) == [(0, 1), (0, 1)]
