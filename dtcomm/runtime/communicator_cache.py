"""The communicators of this process, kept with their process groups.

A communicator is made at the first call on its group and closed when the group is destroyed, at ``release`` or at
interpreter exit. A forked child drops its parent's communicators without touching them.

Point-to-point messages have communicators of the two ranks alone, one for each direction, so that sends do not wait for
receives; the other ranks of the group take no part.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import torch_compat
from dtcomm.errors import CommunicatorClosed
from dtcomm.runtime.bootstrap.connector import connector
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.native.runtime import close_all
from dtcomm.runtime.plans import forget_repeated
from dtcomm.runtime.process_groups import inherited, position, require_group
from dtcomm.work import completion


@dataclass
class GroupEntry:
    """The communicators of one process group.

    ``communicator`` serves CPU tensors, ``devices`` those of each device, and ``pairs`` the messages to or from a peer,
    by its global rank, the direction and their purpose.
    """

    reference: weakref.ref[dist.ProcessGroup]
    communicator: Communicator | None = None
    devices: dict[torch.device, Communicator] = field(default_factory=dict)
    pairs: dict[tuple[int, bool, str], Communicator] = field(default_factory=dict)

    def forget(self, failed: Communicator) -> None:
        """Let the next call make another communicator in place of one whose ranks could not be connected."""
        with _lock:
            if self.communicator is failed:
                self.communicator = None
            self.devices = {key: made for key, made in self.devices.items() if made is not failed}
            self.pairs = {key: made for key, made in self.pairs.items() if made is not failed}

    def communicators(self) -> list[Communicator]:
        """All communicators."""
        communicators = [*self.pairs.values(), *self.devices.values()]
        return communicators + ([self.communicator] if self.communicator else [])


_EXIT_SECONDS = 2.0
_exiting = False
_lock = threading.RLock()
_cache: dict[int, GroupEntry] = {}
_abandoned: list[GroupEntry] = []  # a forked child keeps its parent's entries so that nothing is finalized


def get_communicator(group: dist.ProcessGroup | None) -> Communicator:
    """The group's communicator for CPU tensors. Its ranks may not be connected yet.

    Raises what ``require_group`` raises.
    """
    target: Any = torch_compat.default_group() if group is None else group
    entry = _cache.get(id(target))
    if entry is not None and entry.reference() is target and target in torch_compat.all_groups():
        communicator = entry.communicator
        if communicator is not None:
            return communicator
    sweep()  # a call on a destroyed group fails below: its peers must not wait for this rank
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


def get_communicator_for_device(group: dist.ProcessGroup | None, device: torch.device) -> Communicator:
    """The group's communicator for tensors of a device; ValueError if that is neither the CPU nor CUDA."""
    if device.type == "cpu":
        return get_communicator(group)
    if device.type != "cuda":
        raise ValueError(f"device: is {device}; valid: the CPU and CUDA devices")
    return _on_device(require_group(group), device)


def get_communicator_of_pair(
    group: dist.ProcessGroup | None,
    peer: int,
    argument: str,
    sends: bool,
    purpose: str = "",
    device: torch.device | None = None,
) -> Communicator:
    """The communicator of the messages from this rank to a peer, or from the peer.

    Args:
        group: The process group; None is the default group.
        peer: The peer's global rank.
        argument: What errors call ``peer``.
        sends: Whether this rank sends.
        purpose: Messages of different purposes use different communicators.
        device: The device of the tensors; None is the CPU. Each device has communicators of its own.

    Raises:
        ValueError: If the peer is not in the group or is this rank.
    """
    purpose += "" if device is None else f"{device.type}/"
    target = require_group(group)
    entry, key = group_entry(target), (peer, sends, purpose)
    with _lock:
        communicator = entry.pairs.get(key)
        if communicator is None:
            own = dist.get_rank(target)
            other = position(dist.get_process_group_ranks(target), peer, argument)
            if own == other:
                raise ValueError(f"{argument}: rank {peer} is this rank itself")
            low, high = sorted((own, other))
            name = f"{purpose}{low}-{high}/{'up' if sends == (own == low) else 'down'}"
            communicator = _new(target, entry, name, (low, high), device)
            entry.pairs[key] = communicator
        return communicator


def device_communicators(group: dist.ProcessGroup | None) -> dict[str, Communicator]:
    """The group's communicators for devices that exist already, by device name."""
    entry = _cache.get(id(require_group(group)))
    return (
        {} if entry is None else {str(device): communicator for device, communicator in entry.devices.items()}
    )


def pair_communicators(group: dist.ProcessGroup | None) -> list[tuple[int, bool, Communicator]]:
    """The group's communicators of messages that exist already: (peer, whether this rank sends, communicator)."""
    entry = _cache.get(id(require_group(group)))
    with _lock:
        pairs = {} if entry is None else dict(entry.pairs)
    return [(peer, sends, communicator) for (peer, sends, _), communicator in pairs.items()]


def existing_communicator(group: dist.ProcessGroup) -> Communicator | None:
    """The group's communicator for CPU tensors if it exists already; no other rank is needed."""
    entry = _cache.get(id(group))
    return entry.communicator if entry is not None and entry.reference() is group else None


def existing_communicators(group: dist.ProcessGroup | None) -> list[Communicator]:
    """All communicators of a group that exist already: for the CPU, for devices and for pairs of ranks."""
    target = torch_compat.default_group() if group is None else group
    entry = _cache.get(id(target))
    if target is None or entry is None or entry.reference() is not target:
        return []
    with _lock:
        made = [entry.communicator, *entry.devices.values(), *entry.pairs.values()]
    return [communicator for communicator in made if communicator is not None]


def group_entry(group: dist.ProcessGroup) -> GroupEntry:
    """The entry of a usable group, made if need be. CommunicatorClosed if the program exits."""
    if _exiting:
        completion.hold_at_exit()
        raise CommunicatorClosed("the program exits, so it makes no communicator")
    sweep()
    key = id(group)
    with _lock:
        entry = _cache.get(key)
        if entry is None:
            entry = _cache[key] = GroupEntry(weakref.ref(group, lambda _: sweep()))
        return entry


def sweep() -> None:
    """Close the communicators of destroyed groups."""
    if not _cache:
        return
    groups = torch_compat.all_groups()
    _drop(
        lambda entry: entry.reference() not in groups
    )  # the reference is None once torch has freed the group


def release(group: dist.ProcessGroup | None = None) -> None:
    """Close the communicators of a group now, and those of destroyed groups. A later call on the group makes new ones.

    Every rank of the group should call it: peers that still wait for this rank raise PeerLost.

    Args:
        group: The process group; None is the default group.

    Example:
        >>> dtcomm.release()
    """
    target: Any = torch_compat.default_group() if group is None else group
    groups = torch_compat.all_groups()
    _drop(lambda entry: entry.reference() is target or entry.reference() not in groups)


def _new(
    group: dist.ProcessGroup,
    entry: GroupEntry,
    name: str,
    members: tuple[int, int] | None = None,
    device: torch.device | None = None,
) -> Communicator:
    """A communicator and, if it has several ranks, what connects them later."""
    communicator = Communicator(group, name, members, device)
    if communicator.size > 1:
        communicator.connection = connector(communicator, group, name, members is not None, entry.forget)
    return communicator


def _make(group: dist.ProcessGroup) -> Communicator:
    entry = group_entry(group)
    with _lock:
        if entry.communicator is None:
            entry.communicator = _new(group, entry, "cpu")
        return entry.communicator


def _on_device(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    entry = group_entry(group)
    communicator = entry.devices.get(device)
    if communicator is None:
        with _lock:
            communicator = entry.devices.get(device)
            if communicator is None:
                communicator = _new(group, entry, device.type, device=device)
                entry.devices[device] = communicator
    return communicator


def _drop(chosen: Callable[[GroupEntry], bool]) -> None:
    """Close the chosen entries, all together: what the peers do not receive in time delays the closing once."""
    with _lock:
        # The garbage collector may call this function in between.
        entries = [
            entry
            for key, entry in list(_cache.items())
            if chosen(entry) and _cache.pop(key, None) is not None
        ]
    communicators = [communicator for entry in entries for communicator in entry.communicators()]
    close_all([communicator.runtime for communicator in communicators])
    for communicator in communicators:
        communicator.close()


def _after_fork() -> None:
    # A child has neither the threads nor the mappings of its parent, and one of the threads may hold the lock.
    global _lock
    _lock = threading.RLock()
    inherited.update(id(group) for group in torch_compat.all_groups())
    forget_repeated()
    _abandoned.extend(_cache.values())
    _cache.clear()


@atexit.register
def _shutdown() -> None:
    global _exiting
    _exiting = True
    completion.begin_exit()
    _drop(lambda _: True)
    completion.wait_for_threads(_EXIT_SECONDS)
    if not inherited:
        completion.stop()


os.register_at_fork(after_in_child=_after_fork)
