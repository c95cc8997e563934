"""Identity of a rank's GPU and which peers it reaches, exchanged before ranks map each other's memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from dtcomm import _C

BLOCKS_OF_A_MULTIPROCESSOR = (
    2  # the registers of a fused kernel allow two, and all its blocks must be resident
)


def blocks_of(device: torch.device, ranks: int = 1) -> int:
    """The largest number of thread blocks per rank if ``ranks`` ranks share one launch on the device."""
    most = torch.cuda.get_device_properties(device).multi_processor_count * BLOCKS_OF_A_MULTIPROCESSOR
    return max(1, min(_C.MAX_BLOCKS, most // ranks))


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """What ranks tell each other about their GPU.

    ``id`` is the GPU's UUID, ``sees`` and ``reaches`` are the UUIDs of the GPUs that this process sees and those whose
    memory its GPU can access, ``blocks`` is the largest grid, and ``trouble`` says why the GPU cannot take part.
    """
    if device.type != "cuda":
        return {"id": "", "sees": [], "reaches": [], "blocks": 1, "trouble": f"{device} is no CUDA device"}
    ids = visible_gpu_ids()
    own = torch.cuda.current_device() if device.index is None else device.index
    reaches = [
        gpu_id
        for index, gpu_id in enumerate(ids)
        if index == own or torch.cuda.can_device_access_peer(own, index)
    ]
    built = importlib.util.find_spec("dtcomm._cuda") is not None
    return {
        "id": ids[own],
        "sees": ids,
        "reaches": reaches,
        "blocks": blocks_of(device),
        "trouble": "" if built else "the module _cuda was not built",
    }


def visible_gpu_ids() -> list[str]:
    """The UUIDs of the GPUs that this process sees, by device index."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def why_not_peers(gpus: Sequence[dict[str, Any]], groups: Sequence[Sequence[int]], forced: bool) -> str:
    """Why fused kernels cannot serve the ranks; empty if they can.

    Args:
        gpus: ``describe_gpu`` of every rank.
        groups: The ranks of each host.
        forced: Allow what works but is slow: several ranks on one GPU.
    """
    if len(groups) > 1:
        return f"the ranks are on {len(groups)} hosts"
    if not 2 <= len(gpus) <= _C.MAX_RANKS:
        return f"{len(gpus)} ranks: fused kernels serve 2 to {_C.MAX_RANKS}"
    for rank, gpu in enumerate(gpus):
        if gpu["trouble"]:
            return f"rank {rank}: {gpu['trouble']}"
    ids = [gpu["id"] for gpu in gpus]
    if len(set(ids)) < len(ids) and not forced:
        return "ranks share a GPU, on which kernels that wait for each other take turns"
    for rank, gpu in enumerate(gpus):
        for peer, gpu_id in enumerate(ids):
            if gpu_id in gpu["sees"] and gpu_id not in gpu["reaches"]:
                return f"the GPU of rank {rank} does not reach that of rank {peer}"
    return ""
