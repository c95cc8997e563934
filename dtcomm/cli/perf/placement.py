"""Where a rank runs: its host, core and device, and how much memory it may use."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from dtcomm import measure as device_info
from dtcomm.compress.checkpoint import gather
from dtcomm.measure import Clock, make_clock
from dtcomm.system import allowed_cores

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Process, host and device of a rank, as the table's header shows them."""

    rank: int
    pid: int
    hostname: str
    device: str


class CpuPlacement:
    """CPU tensors.

    ``kind`` is one of DEVICES. ``shared_gpu`` says which ranks share a GPU; it is empty if none do.
    """

    kind = CPU
    device = torch.device("cpu")
    shared_gpu = ""

    def pin(self, wanted: bool | None) -> str:
        """Pin this rank to a core if ``wanted`` says so; return a description for the header."""
        return pin_to_core(wanted)

    def clock(self, cpu: bool) -> Clock:
        """Return the clock for calls on this device; ``cpu`` measures CPU time."""
        return make_clock(self.device, cpu)

    def free_bytes(self) -> int:
        """Return the bytes of device memory this rank may use; practically unlimited on the CPU."""
        return 1 << 62  # `memory_per_rank` checks the host's memory

    def describe_gpu(self) -> dict[str, Any] | None:
        """Return facts about the GPU for the JSON, or None on the CPU."""
        return None


class GpuPlacement:
    """Tensors on the GPU of this process's local rank; ranks share GPUs if there are more ranks than GPUs."""

    kind = CUDA

    def __init__(self, local_rank: int) -> None:
        self.device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.id = f"{platform.node()} {torch.cuda.get_device_properties(self.device).uuid}"
        self.shared_gpu = ""
        self.ranks_on_gpu = 1

    def pin(self, wanted: bool | None) -> str:
        # Pinning also binds the threads of NCCL and of the driver, so it is done only on request.
        pinned = f", {pin_to_core(True)}" if wanted else ""
        return f"{self.device} {torch.cuda.get_device_name(self.device)}{pinned}"

    def clock(self, cpu: bool) -> Clock:
        return make_clock(self.device, cpu)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] // self.ranks_on_gpu

    def describe_gpu(self) -> dict[str, Any] | None:
        return {"host": platform.node(), "device": str(self.device), **device_info.describe_gpu(self.device)}


Placement: TypeAlias = CpuPlacement | GpuPlacement


def cuda_available() -> bool:
    """Return whether torch sees a GPU."""
    return torch.cuda.is_available()


def place_rank(kind: str) -> Placement:
    """Return this rank's placement; all ranks must call it. ValueError if there is no GPU."""
    if kind != CUDA:
        return CpuPlacement()
    if not cuda_available():
        raise ValueError("--device cuda: torch sees no CUDA device; valid: cpu")
    place = GpuPlacement(int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    ids = gather(place.id)
    place.shared_gpu = describe_shared_gpu(ids)
    place.ranks_on_gpu = ids.count(place.id)
    return place


def describe_shared_gpu(ids: list[str]) -> str:
    """Name the first two ranks on one GPU, given the ranks' GPU ids; an empty string if no GPU is shared."""
    for rank, gpu in enumerate(ids):
        if gpu in ids[:rank]:
            return f"ranks {ids.index(gpu)} and {rank} share a GPU"
    return ""


def gather_gpus(place: Placement) -> list[dict[str, Any]]:
    """Return the GPUs of all ranks, without duplicates; all ranks must call it."""
    gpus = gather(place.describe_gpu())
    return list({(gpu["host"], gpu["uuid"]): gpu for gpu in gpus if gpu is not None}.values())


def pin_to_core(wanted: bool | None) -> str:
    """Pin this rank to a core and return a description for the header.

    ``wanted`` None pins only if this host has a core for each of its ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    cores = allowed_cores()
    if not (local_ranks <= len(cores) if wanted is None else wanted):
        return f"cpu any of {len(cores)}"
    core = cores[local_rank % len(cores)]
    os.sched_setaffinity(0, {core})
    return f"cpu {core}"


def gather_rank_info(device: str) -> list[RankInfo]:
    """Return process, host and device of every rank; all ranks must call it."""
    return gather(RankInfo(rank=dist.get_rank(), pid=os.getpid(), hostname=platform.node(), device=device))


def available_memory() -> int:
    """Return the free bytes of this host's memory."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def memory_per_rank(place: Placement, ranks: list[RankInfo]) -> int:
    """Return the bytes that every rank may use, of its host and of its device; all ranks must call it."""
    local_ranks = sum(rank.hostname == platform.node() for rank in ranks)
    return min(gather(min(int(0.8 * available_memory() / local_ranks), int(0.8 * place.free_bytes()))))
