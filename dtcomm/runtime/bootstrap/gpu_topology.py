"""Where a rank's device sits: what ranks tell each other before they try to reach each other's memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from dtcomm import _C

BLOCKS_OF_A_MULTIPROCESSOR = 2  # that a fused kernel's registers allow; all its blocks run at once


def blocks_of(device: torch.device, ranks: int = 1) -> int:
    """The most thread blocks of a rank where so many ranks are in one launch on the device."""
    most = torch.cuda.get_device_properties(device).multi_processor_count * BLOCKS_OF_A_MULTIPROCESSOR
    return max(1, min(_C.MOST_BLOCKS, most // ranks))


def describe(device: torch.device) -> dict[str, Any]:
    """One rank's device: which it is, which it sees and reaches (by ids, the same in every process of a host), and why
    it could not take part.
    """
    if device.type != "cuda":
        return {"id": "", "sees": [], "reaches": [], "blocks": 1, "trouble": f"{device} is no CUDA device"}
    ids = ids_seen()
    mine = torch.cuda.current_device() if device.index is None else device.index
    reaches = [
        each
        for index, each in enumerate(ids)
        if index == mine or torch.cuda.can_device_access_peer(mine, index)
    ]
    built = importlib.util.find_spec("dtcomm._cuda") is not None
    return {
        "id": ids[mine],
        "sees": ids,
        "reaches": reaches,
        "blocks": blocks_of(device),
        "trouble": "" if built else "the module _cuda was not built",
    }


def ids_seen() -> list[str]:
    """Of the devices of this process, by index."""
    return [str(torch.cuda.get_device_properties(each).uuid) for each in range(torch.cuda.device_count())]


def why_not_peers(seats: Sequence[dict[str, Any]], groups: Sequence[Sequence[int]], forced: bool) -> str:
    """Why fused kernels cannot serve the ranks, or, where they are not ``forced``, should not; empty: they can."""
    if len(groups) > 1:
        return f"the ranks are on {len(groups)} hosts"
    if not 2 <= len(seats) <= _C.MOST_RANKS:
        return f"{len(seats)} ranks: fused kernels serve 2 to {_C.MOST_RANKS}"
    for rank, seat in enumerate(seats):
        if seat["trouble"]:
            return f"rank {rank}: {seat['trouble']}"
    ids = [seat["id"] for seat in seats]
    if len(set(ids)) < len(ids) and not forced:
        return "ranks share a GPU, on which kernels that wait for each other take turns"
    for rank, seat in enumerate(seats):
        for peer, other in enumerate(ids):
            if other in seat["sees"] and other not in seat["reaches"]:
                return f"the GPU of rank {rank} does not reach that of rank {peer}"
    return ""
