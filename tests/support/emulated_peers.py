"""Ranks in processes of their own whose fused kernels run in the emulator, over the whole path of the peer runtime.

The emulator runs all ranks of a call in one process. So every rank gathers the tensors of all ranks before a launch,
runs the kernels of all of them on its own copy of their memory, and keeps what its own rank writes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.runtime.bootstrap import cpu, cuda
from dtcomm.runtime.communicator import Communicator, _new, group_entry, require_group
from dtcomm.runtime.cuda_peer.launch import COLLECTIVES, LaunchFunction, RankPointers
from dtcomm.runtime.cuda_peer.memory import PeerBuffers

ELEMENT_SIZES = {number: dtype.itemsize for dtype, number in ELEMENT_TYPES.items()}
ALIGN = 16


class Span(NamedTuple):
    """Memory of a rank: its address there, and its bytes."""

    address: int
    data: bytes


class GatheringLauncher:
    """A `Launcher` for a rank in a process of its own; all ranks of the default group plan and launch alike."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.launches = 0

    def plan(self, **spec: Any) -> LaunchFunction:
        from dtcomm import _emulator

        _emulator.FusedPlan(**spec)  # raises for what the rank cannot plan for itself, on all ranks
        specs: list[Any] = [None] * self.ranks
        dist.all_gather_object(specs, spec)
        for name in set(spec) - {"first_rank", "memory"}:
            assert all(other[name] == spec[name] for other in specs), f"ranks plan different calls: {name}"
        plan = _emulator.FusedPlan(**{**spec, "first_rank": 0, "local_ranks": self.ranks})

        def launch(tensors: list[RankPointers], features: int) -> None:
            spans = merged_spans(zip(tensors[0], self._sizes(spec, features), strict=True))
            everything: list[Any] = [None] * self.ranks
            dist.all_gather_object(everything, (tensors[0], spans))
            kept: list[Any] = []
            pointers = [
                own if rank == self.rank else copied(own, copies, kept)
                for rank, (own, copies) in enumerate(everything)
            ]
            plan.launch(pointers, seed=self.launches, features=features)
            self.launches += 1

        return launch

    def _sizes(self, spec: dict[str, Any], features: int) -> tuple[int, int, int, int, int]:
        """Bytes of the rank's input, output, residual, bias and addend."""
        rank, ranks, size = self.rank, self.ranks, ELEMENT_SIZES[spec["dtype"]]
        numel_in = numel_out = spec["numel"]
        if spec["collective"] in (COLLECTIVES["reduce_scatter"], COLLECTIVES["all_to_all"]):
            numel_in *= ranks
        if spec["collective"] in (COLLECTIVES["all_gather"], COLLECTIVES["all_to_all"]):
            numel_out *= ranks
        if spec["splits"]:
            numel_in = sum(spec["splits"][rank * ranks : (rank + 1) * ranks])
            numel_out = sum(spec["splits"][rank::ranks])
        return numel_in * size, numel_out * size, numel_in * 4, features * size, numel_out * size


def merged_spans(tensors: Any) -> list[Span]:
    """The bytes of (address, size) pairs; what overlaps is one span, so that copies overlap alike."""
    merged: list[list[int]] = []
    for begin, end in sorted((address, address + size) for address, size in tensors if address and size):
        if merged and begin < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [Span(begin, ctypes.string_at(begin, end - begin)) for begin, end in merged]


def copied(pointers: RankPointers, spans: Sequence[Span], kept: list[Any]) -> RankPointers:
    """The addresses of another rank's tensors in copies of its memory, which ``kept`` keeps alive."""
    copies = []
    for address, data in spans:
        memory = ctypes.create_string_buffer(len(data) + 2 * ALIGN)
        begin = -(-ctypes.addressof(memory) // ALIGN) * ALIGN + address % ALIGN
        ctypes.memmove(begin, data, len(data))
        copies.append((address, address + len(data), begin))
        kept.append(memory)

    def moved(pointer: int) -> int:
        return next((to + pointer - begin for begin, end, to in copies if begin <= pointer < end), pointer)

    return tuple(map(moved, pointers))  # type: ignore[return-value]


def communicator_of_emulated_peers(nvlink: bool = True) -> Communicator:
    """Return the default group's communicator for CPU tensors as if they were on GPUs with fused kernels."""
    os.environ["DTCOMM_RUNTIME"] = "peer"
    ids = [f"gpu {rank}" for rank in range(dist.get_world_size())]

    def describe_gpu(device: torch.device) -> dict[str, Any]:
        links = ids if nvlink else []
        return {
            "id": ids[dist.get_rank()],
            "sees": ids,
            "reaches": ids,
            "nvlinks": links,
            "blocks": 2,
            "trouble": "",
        }

    def map_peers(*arguments: Any) -> tuple[PeerBuffers, str]:
        size, rank = arguments[4:6]
        memory = [torch.zeros(size + ALIGN, dtype=torch.uint8) for _ in ids]
        aligned = [tensor[-tensor.data_ptr() % ALIGN :][:size] for tensor in memory]
        addresses = tuple(tensor.data_ptr() for tensor in aligned)
        return PeerBuffers("emulated memory", addresses, aligned[rank], memory), ""

    cuda.describe_gpu, cuda.map_peers = describe_gpu, map_peers  # type: ignore[assignment]
    cuda.launcher_for = lambda device: GatheringLauncher()  # type: ignore[assignment]
    cuda.backend_of = lambda group, device: "gloo"  # type: ignore[assignment]
    cuda.CudaBootstrap._private_backend = lambda self, backend: cpu.CpuBootstrap._private_backend(
        self, "gloo"
    )  # type: ignore[method-assign]
    group = require_group(None)
    entry = group_entry(group)
    communicator = _new(group, entry, "as_on_gpus", device=torch.device("cpu"))
    communicator.connect()
    entry.communicator = communicator
    return communicator
