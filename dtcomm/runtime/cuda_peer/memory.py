"""Memory of each GPU of a host that the others reach: torch's symmetric memory, or by handles of CUDA IPC.

In two steps, between which ranks tell each other how the first one went: nobody waits in the second one for a rank that
could not even make its own memory.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dtcomm.runtime.bootstrap.gpu_topology import visible_gpu_ids
from dtcomm.runtime.bootstrap.store_exchange import StoreExchange

SYMMETRIC, IPC = "symmetric memory", "CUDA IPC"
Made = TypeVar("Made", "Offer", "Reached")
# Torch numbers the rendezvous of a process, whatever groups they are of, and ranks whose numbers differ wait for each
# other in vain. So all have to have been at as many; -1: one broke off, and who knows how far it was counted.
_rendezvous = 0


class Offer(NamedTuple):
    """A rank's own memory, zeros, and the word by which others reach it."""

    own: torch.Tensor
    word: dict[str, Any]


class Reached(NamedTuple):
    """Where each rank's memory begins, seen from here; ``own`` is this rank's, ``held`` keeps the others'.

    ``word`` is what all ranks have to say alike.
    """

    kind: str
    addresses: tuple[int, ...]
    own: torch.Tensor
    held: Any
    word: int = 0


def reach(
    exchange: StoreExchange,
    names: Sequence[str],
    group: dist.ProcessGroup,
    device: torch.device,
    size: int,
    rank: int,
    seats: Sequence[str],
) -> tuple[Reached | None, str]:
    """Memory of ``size`` bytes that all ranks reach, and why it is of no better kind or there is none; the same on all.

    ``names`` is how errors call the ranks, ``seats`` are the ids of their devices.
    """
    found: list[str] = []
    for kind in (SYMMETRIC, IPC):
        offered, words, trouble = _agree(
            exchange, names, partial(offer, kind, group, device, size, rank, len(names))
        )
        if offered is not None:
            step = partial(symmetric, group, offered, words, rank)
            if kind == IPC:
                step = partial(by_handles, device, offered, words, rank, seats)
            made, words, trouble = _agree(exchange, names, step)
            if made is not None and len(set(words)) == 1:
                return made, "; ".join(found)
            trouble = trouble or f"the ranks' memories begin at different offsets, {words}"
        found.append(f"{kind}: {trouble}")
    return None, "; ".join(found)


def _agree(
    exchange: StoreExchange, names: Sequence[str], step: Callable[[], Made]
) -> tuple[Made | None, list[Any], str]:
    """What a step made here and what all say of it; or, where one rank could not, nothing and why."""
    made, trouble = None, ""
    try:
        made = step()
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        trouble = str(error).splitlines()[0] if str(error) else repr(error)
    said = exchange.all_gather({"trouble": trouble, "word": None if made is None else made.word})
    troubles = [
        f"{name}: {each['trouble']}" for name, each in zip(names, said, strict=True) if each["trouble"]
    ]
    return (None, [], troubles[0]) if troubles else (made, [each["word"] for each in said], "")


def offer(
    kind: str, group: dist.ProcessGroup, device: torch.device, size: int, rank: int, ranks: int
) -> Offer:
    """By itself. RuntimeError where this rank cannot."""
    if kind == SYMMETRIC:
        if ranks < dist.get_world_size(group):
            raise RuntimeError("these are not all ranks of the group")
        import torch.distributed._symmetric_memory as memory

        own = memory.empty(size, dtype=torch.uint8, device=device).zero_()
        word: dict[str, Any] = {"rendezvous": _rendezvous}
    else:
        own = torch.zeros(size, dtype=torch.uint8, device=device)
        storage: Any = own.untyped_storage()
        # One for each: torch keeps the memory until as many as it was shared with have let go of it.
        shared = [() if other == rank else storage._share_cuda_() for other in range(ranks)]
        word = {"handles": [[_text(each) for each in handle] for handle in shared]}
    torch.cuda.current_stream(device).synchronize()  # before a peer's first signal
    return Offer(own, word)


def symmetric(
    group: dist.ProcessGroup, offered: Offer, words: Sequence[dict[str, Any]], rank: int
) -> Reached:
    """With all ranks of the group. RuntimeError where torch cannot make it."""
    import torch.distributed._symmetric_memory as memory

    global _rendezvous
    before = [word["rendezvous"] for word in words]
    if min(before) < 0 or len(set(before)) > 1:
        raise RuntimeError(f"the ranks' processes have been at different numbers of rendezvous, {before}")
    _rendezvous = -1
    handle: Any = memory.rendezvous(offered.own, group.group_name)
    if handle is None:
        raise RuntimeError("torch made no symmetric memory")
    _rendezvous = before[0] + 1
    offset = int(getattr(handle, "offset", 0))
    addresses = tuple(int(address) + offset for address in handle.buffer_ptrs)
    if addresses[rank] != offered.own.data_ptr():
        raise RuntimeError("torch's symmetric memory lies elsewhere than its tensor")
    return Reached(SYMMETRIC, addresses, offered.own, handle, offset)


def by_handles(
    device: torch.device, offered: Offer, words: Sequence[dict[str, Any]], rank: int, seats: Sequence[str]
) -> Reached:
    """The same by IPC handles; ``seats`` are the ids of the ranks' devices. RuntimeError where one is not seen here."""
    seen_here = visible_gpu_ids()
    addresses, held = [], []
    for other, word in enumerate(words):
        if other == rank:
            addresses.append(offered.own.data_ptr())
            continue
        _, *rest = [_value(each) for each in word["handles"][rank]]
        if seats[other] not in seen_here:
            raise RuntimeError(f"the GPU of rank {other} is hidden from this process")
        storage = torch.UntypedStorage._new_shared_cuda(seen_here.index(seats[other]), *rest)
        seen = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        # Torch then lets the devices reach each other.
        torch.empty(1, dtype=torch.uint8, device=device).copy_(seen[:1])
        addresses.append(seen.data_ptr())
        held.append(seen)
    torch.cuda.current_stream(device).synchronize()
    return Reached(IPC, tuple(addresses), offered.own, (offered.own, held))


def _text(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _value(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
