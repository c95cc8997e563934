"""Memory of each GPU of a host that the others reach: torch's symmetric memory, or by handles of CUDA IPC."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtcomm.runtime.meeting import Meeting
from dtcomm.runtime.seats import ids_seen

SYMMETRIC, IPC = "symmetric memory", "CUDA IPC"


class Reached(NamedTuple):
    """Where each rank's memory begins, seen from here; ``own`` is this rank's, ``held`` keeps the others'."""

    kind: str
    addresses: tuple[int, ...]
    own: torch.Tensor
    held: Any


def symmetric(group: dist.ProcessGroup, device: torch.device, size: int, rank: int) -> Reached:
    """With all ranks of the group. RuntimeError where torch cannot make it."""
    import torch.distributed._symmetric_memory as memory

    own = memory.empty(size, dtype=torch.uint8, device=device)
    own.zero_()
    torch.cuda.current_stream(device).synchronize()  # before a peer's first signal
    handle: Any = memory.rendezvous(own, group.group_name)
    if handle is None:
        raise RuntimeError("torch made no symmetric memory")
    offset = int(getattr(handle, "offset", 0))
    addresses = tuple(int(address) + offset for address in handle.buffer_ptrs)
    if addresses[rank] != own.data_ptr():
        raise RuntimeError("torch's symmetric memory lies elsewhere than its tensor")
    return Reached(SYMMETRIC, addresses, own, handle)


def by_handles(meeting: Meeting, device: torch.device, size: int, rank: int, seats: Sequence[str]) -> Reached:
    """The same by IPC handles; ``seats`` are the ids of the ranks' devices. RuntimeError where one is not seen here."""
    seen_here = ids_seen()
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()
    shared: Any = own.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    words = meeting.exchange({"handle": [_text(each) for each in shared]})
    addresses, held = [], []
    for other, word in enumerate(words):
        if other == rank:
            addresses.append(own.data_ptr())
            continue
        _, *rest = [_value(each) for each in word["handle"]]
        if seats[other] not in seen_here:
            raise RuntimeError(f"the GPU of rank {other} is hidden from this process")
        storage = torch.UntypedStorage._new_shared_cuda(seen_here.index(seats[other]), *rest)
        seen = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.empty(1, dtype=torch.uint8, device=device).copy_(
            seen[:1]
        )  # torch then lets the devices reach each other
        addresses.append(seen.data_ptr())
        held.append(seen)
    torch.cuda.current_stream(device).synchronize()
    return Reached(IPC, tuple(addresses), own, (own, held))


def _text(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _value(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
