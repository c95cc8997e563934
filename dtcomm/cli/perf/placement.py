"""Where a rank's tensors are: on the CPU, or on a GPU that it has to itself or shares."""

from __future__ import annotations

import os
import platform
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dtcomm.cli.perf import host
from dtcomm.measure import gpu_info
from dtcomm.measure.device_clock import Clock, make_clock

CPU, CUDA, EMULATOR = "cpu", "cuda", "emulator"
DEVICES = (CPU, CUDA, EMULATOR)


class Place(Protocol):
    """``kind`` is one of DEVICES; ``shared`` says which ranks share a GPU, empty where none do."""

    kind: str
    device: torch.device
    shared: str

    def pin(self, wanted: bool | None) -> str:
        """Give this rank a core where that is wanted; a few words on where it is, for the header."""

    def clock(self, cpu: bool) -> Clock:
        """What times calls here; ``cpu``: the CPU time that they take."""

    def free(self) -> int:
        """Bytes of the device that this rank may use; a large number on the CPU, whose memory is asked elsewhere."""

    def facts(self) -> dict[str, Any] | None:
        """Of the GPU, for the JSON."""


class OnHost:
    """Tensors on the CPU."""

    kind = CPU
    device = torch.device("cpu")
    shared = ""

    def pin(self, wanted: bool | None) -> str:
        return host.pin(wanted)

    def clock(self, cpu: bool) -> Clock:
        return make_clock(self.device, cpu)

    def free(self) -> int:
        return 1 << 62

    def facts(self) -> dict[str, Any] | None:
        return None


class OnGpu:
    """Tensors on the GPU of this process's local rank; ranks share where there are more of them."""

    kind = CUDA

    def __init__(self, local: int) -> None:
        self.device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.id = f"{platform.node()} {torch.cuda.get_device_properties(self.device).uuid}"
        self.shared = ""
        self.here = 1  # ranks on this GPU

    def pin(self, wanted: bool | None) -> str:
        # The threads of NCCL and of the driver would be bound with the rank: only where that is asked for.
        pinned = f", {host.pin(True)}" if wanted else ""
        return f"{self.device} {torch.cuda.get_device_name(self.device)}{pinned}"

    def clock(self, cpu: bool) -> Clock:
        return make_clock(self.device, cpu)

    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] // self.here

    def facts(self) -> dict[str, Any] | None:
        return {"host": platform.node(), "device": str(self.device), **gpu_info.describe_gpu(self.device)}


def found() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


def take(kind: str) -> Place:
    """This rank's place; all ranks call it. ValueError where there is no GPU."""
    if kind != CUDA:
        return OnHost()
    if not found():
        raise ValueError(
            "--device cuda: torch sees no CUDA device; valid here: cpu, and emulator with --virtual"
        )
    place = OnGpu(int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    ids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ids, place.id)
    place.shared = shared(ids)
    place.here = ids.count(place.id)
    return place


def shared(ids: list[str]) -> str:
    """The first ranks that are on one GPU, in words; ``ids`` are the ranks' GPUs."""
    for rank, each in enumerate(ids):
        if each in ids[:rank]:
            return f"ranks {ids.index(each)} and {rank} share a GPU"
    return ""


def gpus(place: Place) -> list[dict[str, Any]]:
    """The GPUs of all ranks, each once; all ranks call it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, place.facts())
    return list({(each["host"], each["uuid"]): each for each in everyone if each is not None}.values())
