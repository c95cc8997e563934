"""The communicators of this process, kept with their process groups.

A communicator is made at the first call on its group and closed when the group is destroyed, at ``release`` or at
interpreter exit. A forked child drops its parent's communicators without touching them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import future_completion
from dtcomm.errors import CollectiveTimeout, DtcommError
from dtcomm.runtime.bootstrap.store_exchange import Deadline
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.process_groups import group_timeout, inherited, require_group


class Closeable(Protocol):
    """Something that is closed with its process group."""

    def close(self) -> None:
        """Release everything."""


@dataclass
class GroupEntry:
    """What is kept for one process group.

    ``communicator`` serves CPU tensors, ``devices`` those of each device, and ``pairs`` the point-to-point messages
    with a peer, by its global rank and their purpose.
    """

    reference: weakref.ref[dist.ProcessGroup]
    communicator: Communicator | None = None
    devices: dict[torch.device, Communicator] = field(default_factory=dict)
    pairs: dict[tuple[int, str], Any] = field(default_factory=dict)
    making: threading.RLock = field(default_factory=threading.RLock)

    def close(self) -> None:
        """Close all communicators and pairs."""
        members: list[Closeable] = [*self.pairs.values(), *self.devices.values()]
        members += [self.communicator] if self.communicator else []
        for member in members:
            member.close()


_GRACE_SECONDS = 0.5
_lock = threading.RLock()
_cache: dict[int, GroupEntry] = {}
_abandoned: list[GroupEntry] = []  # a forked child keeps its parent's entries so that nothing is finalized


def get_communicator(group: dist.ProcessGroup | None) -> Communicator:
    """The group's communicator for CPU tensors. The first call makes it, and all ranks of the group must take part.

    Raises what ``require_group`` raises.
    """
    world: Any = c10d._world
    target: Any = world.default_pg if group is None else group
    entry = _cache.get(id(target))
    if entry is not None and entry.reference() is target and target in world.pg_map:
        communicator = entry.communicator
        if communicator is not None:
            return communicator
    return _make(require_group(group))


def get_communicator_for(group: dist.ProcessGroup | None, tensor: Any, argument: str) -> Communicator:
    """The group's communicator for the device of ``tensor``; ValueError if that is neither the CPU nor CUDA."""
    if (
        not isinstance(tensor, torch.Tensor) or tensor.is_cpu
    ):  # callers refuse non-tensors with a better message
        return get_communicator(group)
    device = tensor.device
    if device.type != "cuda":
        raise ValueError(f"{argument}: is on {device}; valid: tensors on the CPU and on CUDA devices")
    return _on_device(require_group(group), device)


def device_communicators(group: dist.ProcessGroup | None) -> dict[str, Communicator]:
    """The group's communicators for devices that exist already, by device name."""
    entry = _cache.get(id(require_group(group)))
    return (
        {} if entry is None else {str(device): communicator for device, communicator in entry.devices.items()}
    )


def existing_communicator(group: dist.ProcessGroup) -> Communicator | None:
    """The group's communicator for CPU tensors if it exists already; no other rank is needed."""
    entry = _cache.get(id(group))
    return entry.communicator if entry is not None and entry.reference() is group else None


def group_entry(group: dist.ProcessGroup) -> GroupEntry:
    """The entry of a usable group, made if need be."""
    with _lock:
        sweep()
        key = id(group)
        entry = _cache.get(key)
        if entry is None:
            entry = _cache[key] = GroupEntry(weakref.ref(group, lambda _: _drop(key)))
        return entry


def sweep() -> None:
    """Close the communicators of destroyed groups."""
    world: Any = c10d._world
    with _lock:
        for key, entry in list(_cache.items()):
            group = entry.reference()
            if group is None or group not in world.pg_map:
                _drop(key)


def release(group: dist.ProcessGroup | None = None) -> None:
    """Close the communicators of a group now. A later call on the group makes new ones.

    Every rank of the group should call it: peers that still wait for this rank raise PeerLost.

    Args:
        group: The process group; None is the default group.

    Example:
        >>> dtcomm.release()
    """
    world: Any = c10d._world
    target: Any = world.default_pg if group is None else group
    _drop(id(target))


def _make(group: dist.ProcessGroup) -> Communicator:
    entry, deadline = group_entry(group), Deadline(group_timeout(group))
    with _making(entry, deadline):
        if entry.communicator is None:
            entry.communicator = _kept(group, entry, Communicator(group, "cpu", deadline=deadline))
        return entry.communicator


def _on_device(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    entry = group_entry(group)
    communicator = entry.devices.get(device)
    if communicator is None:
        deadline = Deadline(group_timeout(group))
        with _making(entry, deadline):
            communicator = entry.devices.get(device)
            if communicator is None:
                made = Communicator(group, device.type, device=device, deadline=deadline)
                communicator = entry.devices[device] = _kept(group, entry, made)
    return communicator


@contextlib.contextmanager
def _making(entry: GroupEntry, deadline: Deadline) -> Iterator[None]:
    """Let one thread at a time make the group's communicators. Calls on other groups and pairs proceed meanwhile."""
    # A thread that began first fails first. With the rest of its time, if any, this one then finds out who is late.
    if not entry.making.acquire(timeout=min(deadline.left_s() + _GRACE_SECONDS, threading.TIMEOUT_MAX)):
        raise CollectiveTimeout(
            f"another thread of this rank did not make the communicator before the timeout of "
            f"{deadline.timeout_s:g} s"
        )
    try:
        yield
    finally:
        entry.making.release()


def _kept(group: dist.ProcessGroup, entry: GroupEntry, communicator: Communicator) -> Communicator:
    """A new communicator, unless the group was released while it was made: nothing would close it."""
    if _cache.get(id(group)) is not entry:
        communicator.close()
        raise DtcommError("group: its communicators have been released")
    return communicator


def _drop(key: int) -> None:
    with _lock:
        entry = _cache.pop(key, None)
    if entry is not None:
        entry.close()


def _after_fork() -> None:
    # A child has neither the threads nor the mappings of its parent.
    world: Any = c10d._world
    inherited.update(id(group) for group in world.pg_map)
    _abandoned.extend(_cache.values())
    _cache.clear()


@atexit.register
def _shutdown() -> None:
    for key in list(_cache):
        _drop(key)
    if not inherited:
        future_completion.stop()


os.register_at_fork(after_in_child=_after_fork)
