"""Where the ranks run: on which host and core, and how much memory there is for them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Where a rank runs."""

    rank: int
    pid: int
    hostname: str
    device: str


def pin(wanted: bool | None) -> str:
    """Give this rank a core of its own where there is one for each, or where asked; says what was done."""
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    cores = sorted(os.sched_getaffinity(0))
    if not (here <= len(cores) if wanted is None else wanted):
        return f"cpu any of {len(cores)}"
    core = cores[local % len(cores)]
    os.sched_setaffinity(0, {core})
    return f"cpu {core}"


def ranks(device: str) -> list[Rank]:
    """Where every rank runs; all ranks call it."""
    mine = Rank(rank=dist.get_rank(), pid=os.getpid(), hostname=platform.node(), device=device)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def available() -> int:
    """Bytes of this host's memory that are free."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def memory(everywhere: list[Rank]) -> int:
    """Bytes that each rank may use: its part of what is free on the host where that is least."""
    here = sum(rank.hostname == platform.node() for rank in everywhere)
    shares: list[int] = [0] * len(everywhere)
    dist.all_gather_object(shares, int(0.8 * available() / here))
    return min(shares)
