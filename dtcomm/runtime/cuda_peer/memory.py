"""GPU memory that the other ranks of a host can reach: torch's symmetric memory, or memory shared by CUDA IPC handles.

First the ranks exchange what :func:`describe_gpu` says about their GPUs, and :func:`why_not_peers` decides whether they
can reach each other's memory. Then :func:`map_peers` allocates and maps it in two steps. After each step the ranks
exchange how it went, so that no rank waits in the second step for a rank that could not allocate its own memory.
``dtcomm.runtime.bootstrap.cuda`` calls these functions.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dtcomm import _C, torch_compat
from dtcomm.runtime.bootstrap.rendezvous import StoreExchange
from dtcomm.runtime.cuda_peer.launch import blocks_of

SYMMETRIC, IPC = "symmetric memory", "CUDA IPC"
Result = TypeVar("Result", "LocalBuffer", "PeerBuffers")
# Torch numbers the rendezvous of a process, whatever groups they belong to, and ranks whose numbers differ wait for
# each other in vain. So all ranks must have made the same number of them; -1: one failed, and it is unknown whether it
# counted.
_rendezvous = 0


class LocalBuffer(NamedTuple):
    """A rank's own memory, filled with zeros, and the information by which other ranks map it."""

    own: torch.Tensor
    info: dict[str, Any]


class PeerBuffers(NamedTuple):
    """The reachable memory of all ranks: ``addresses`` as this process sees them, ``own`` for this rank.

    ``handles`` keeps the mapping alive. ``offset`` must be the same on all ranks.
    """

    kind: str
    addresses: tuple[int, ...]
    own: torch.Tensor
    handles: Any
    offset: int = 0


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """What ranks tell each other about their GPU.

    ``id`` is the GPU's UUID, ``sees`` and ``reaches`` are the UUIDs of the GPUs that this process sees and those whose
    memory its GPU can access, ``nvlinks`` are those that it is connected with by NVLink (None: unknown), ``blocks`` is
    the largest grid, and ``trouble`` says why the GPU cannot take part.
    """
    if device.type != "cuda":
        trouble = f"{device} is no CUDA device"
        return {"id": "", "sees": [], "reaches": [], "nvlinks": None, "blocks": 1, "trouble": trouble}
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
        "nvlinks": nvlinks_of(own, ids),
        "blocks": blocks_of(device),
        "trouble": "" if built else "the module _cuda was not built",
    }


def visible_gpu_ids() -> list[str]:
    """The UUIDs of the GPUs that this process sees, by device index."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def nvlinks_of(gpu: int, ids: Sequence[str]) -> list[str] | None:
    """The ids of the GPUs that NVLink connects with this one, directly or through a switch; None where it is unknown.

    ``gpu`` is the index of a GPU that this process sees, ``ids`` are the ids of all that it sees.
    """
    links = torch_compat.nvlinks(gpu)
    if links is None:
        return None
    return [gpu_id for gpu_id, count in zip(ids, links, strict=False) if count]


def missing_nvlink(gpus: Sequence[dict[str, Any]]) -> str:
    """Two GPUs that NVLink does not connect, or may not connect; empty where it connects all pairs."""
    for rank, gpu in enumerate(gpus):
        for peer, other in enumerate(gpus):
            if other["id"] == gpu["id"]:
                continue
            pair = f"the GPUs of ranks {rank} and {peer}"
            if gpu["nvlinks"] is None or other["id"] not in gpu["sees"]:
                return f"whether NVLink connects {pair} is unknown"
            if other["id"] not in gpu["nvlinks"]:
                return f"NVLink does not connect {pair}"
    return ""


def why_not_peers(gpus: Sequence[dict[str, Any]], groups: Sequence[Sequence[int]], forced: bool) -> str:
    """Why fused kernels cannot serve the ranks, of which ``groups`` are those of each host; empty if they can.

    ``gpus`` are ``describe_gpu`` of every rank. ``forced`` allows what works but is slow: several ranks on one GPU.
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


def map_peers(
    exchange: StoreExchange,
    names: Sequence[str],
    group: dist.ProcessGroup,
    device: torch.device,
    size: int,
    rank: int,
    gpu_ids: Sequence[str],
) -> tuple[PeerBuffers | None, str]:
    """Allocate ``size`` bytes for each rank that all ranks reach; every rank calls it and gets the same outcome.

    Returns:
        The memory, or None, and why a better kind of memory, or any, is not available.
    """
    reasons: list[str] = []
    for kind in (SYMMETRIC, IPC):
        local, infos, error = _run_step(
            exchange, names, partial(allocate, kind, group, device, size, rank, len(names))
        )
        if local is not None:
            step = partial(map_symmetric, group, local, infos, rank)
            if kind == IPC:
                step = partial(map_ipc_handles, device, local, infos, rank, gpu_ids)
            mapped, offsets, error = _run_step(exchange, names, step)
            if mapped is not None and len(set(offsets)) == 1:
                return mapped, "; ".join(reasons)
            error = error or f"the ranks' memory begins at different offsets, {offsets}"
        reasons.append(f"{kind}: {error}")
    return None, "; ".join(reasons)


def _run_step(
    exchange: StoreExchange, names: Sequence[str], step: Callable[[], Result]
) -> tuple[Result | None, list[Any], str]:
    """Run a step on all ranks: its result here and what all ranks report, or no result and the first rank's error."""
    result, error = None, ""
    try:
        result = step()
    except (RuntimeError, ImportError, AttributeError, OSError) as caught:
        error = str(caught).splitlines()[0] if str(caught) else repr(caught)
    info = result.info if isinstance(result, LocalBuffer) else result.offset if result is not None else None
    answers = exchange.all_gather({"error": error, "info": info})
    errors = [
        f"{name}: {answer['error']}" for name, answer in zip(names, answers, strict=True) if answer["error"]
    ]
    return (None, [], errors[0]) if errors else (result, [answer["info"] for answer in answers], "")


def allocate(
    kind: str, group: dist.ProcessGroup, device: torch.device, size: int, rank: int, ranks: int
) -> LocalBuffer:
    """Allocate this rank's memory, without waiting for other ranks. Raises RuntimeError where it cannot."""
    if kind == SYMMETRIC:
        if ranks < dist.get_world_size(group):
            raise RuntimeError("these are not all ranks of the group")
        memory = torch_compat.symmetric_memory()

        own = memory.empty(size, dtype=torch.uint8, device=device).zero_()
        info: dict[str, Any] = {"rendezvous": _rendezvous}
    else:
        own = torch.zeros(size, dtype=torch.uint8, device=device)
        storage: Any = own.untyped_storage()
        # A handle for each peer: torch keeps the memory until as many users as it was shared with have released it.
        shared = [() if peer == rank else torch_compat.share_cuda(storage) for peer in range(ranks)]
        info = {"handles": [[_encode(value) for value in handle] for handle in shared]}
    torch.cuda.current_stream(device).synchronize()  # the zeros are written before a peer's first signal
    return LocalBuffer(own, info)


def map_symmetric(
    group: dist.ProcessGroup, local: LocalBuffer, infos: Sequence[dict[str, Any]], rank: int
) -> PeerBuffers:
    """Map symmetric memory, together with all ranks of the group. Raises RuntimeError where torch cannot."""
    memory = torch_compat.symmetric_memory()

    global _rendezvous
    counts = [info["rendezvous"] for info in infos]
    if min(counts) < 0 or len(set(counts)) > 1:
        raise RuntimeError(
            f"symmetric-memory rendezvous counts differ between ranks ({counts}); all ranks must create symmetric "
            "memory the same number of times"
        )
    _rendezvous = -1
    handle: Any = memory.rendezvous(local.own, group.group_name)
    if handle is None:
        raise RuntimeError("torch made no symmetric memory")
    _rendezvous = counts[0] + 1
    offset = int(getattr(handle, "offset", 0))
    addresses = tuple(int(address) + offset for address in handle.buffer_ptrs)
    if addresses[rank] != local.own.data_ptr():
        raise RuntimeError("torch's symmetric memory is not at the address of its tensor")
    return PeerBuffers(SYMMETRIC, addresses, local.own, handle, offset)


def map_ipc_handles(
    device: torch.device,
    local: LocalBuffer,
    infos: Sequence[dict[str, Any]],
    rank: int,
    gpu_ids: Sequence[str],
) -> PeerBuffers:
    """Map memory by CUDA IPC handles. Raises RuntimeError where a rank's GPU is not visible to this process."""
    visible = visible_gpu_ids()
    addresses, mapped = [], []
    for peer, info in enumerate(infos):
        if peer == rank:
            addresses.append(local.own.data_ptr())
            continue
        _, *handle = [_decode(value) for value in info["handles"][rank]]
        if gpu_ids[peer] not in visible:
            raise RuntimeError(f"the GPU of rank {peer} is hidden from this process")
        storage = torch_compat.open_shared_cuda(visible.index(gpu_ids[peer]), handle)
        buffer = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        # A copy makes torch enable access between the two devices.
        torch.empty(1, dtype=torch.uint8, device=device).copy_(buffer[:1])
        addresses.append(buffer.data_ptr())
        mapped.append(buffer)
    torch.cuda.current_stream(device).synchronize()
    return PeerBuffers(IPC, tuple(addresses), local.own, (local.own, mapped))


def _encode(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decode(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
