"""Communicators: the ranks of a process group and the runtime that executes their operations.

A communicator is made at the first call on its group, is kept with the group, and is closed when the group is
destroyed, at ``release`` or at interpreter exit. A forked child drops its parent's communicators without touching them.

A group of one rank has a `SingleRankRuntime`. How the ranks of larger groups meet and choose a runtime is the matter of
``dtcomm.runtime.bootstrap``, which `connect_with` names.

Point-to-point messages have communicators of the two ranks alone, one for each direction, so that sends do not wait for
receives; the other ranks of the group take no part.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dtcomm import _C, env, torch_compat
from dtcomm.errors import CommunicatorClosed, DtcommError
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.native import close_all
from dtcomm.runtime.native.copy_policy import empty_shared
from dtcomm.runtime.plans import PlanCache, forget_repeated
from dtcomm.runtime.process_groups import inherited, position, require_group
from dtcomm.runtime.types import Runtime, SingleRankRuntime
from dtcomm.work import Work, completion


class Bootstrap(Protocol):
    """How the ranks agree on a runtime; the attributes are known once ``join`` has returned or raised."""

    names: list[str]
    groups: tuple[tuple[int, ...], ...]
    tuning_table: str
    links: str
    reason: str
    epoch: int
    runtime: Runtime | None

    def join(self) -> None:
        """Agree on a runtime with all ranks."""


class Connecting(Protocol):
    """What connects the ranks of a communicator, and takes its operations until then."""

    plans: PlanCache

    def wait(self) -> None:
        """Connect the ranks, or wait until another thread has done so."""

    def start(self, outputs: Sequence[torch.Tensor], start: Callable[[], Work]) -> Work:
        """Start an operation now if the ranks are connected, else as soon as they are."""

    def cancel(self) -> bool:
        """Stop connecting; False if the ranks are connected already."""


class Communicator:
    """The ranks of one process group and the runtime that executes their operations.

    Making one waits for no other rank. Who makes one of several ranks gives it a ``connection``, which takes the
    operations until the ranks are connected. ``name`` distinguishes it from the group's other communicators and is
    equal on all ranks. ``members`` are the group ranks that take part, in order; None: all.

    Attributes:
        rank, size: This rank and the number of ranks, within the group.
        ranks: The global rank of each rank.
        names: How error messages name each rank.
        connection: What connects the ranks; None once they are connected.
        runtime: What executes operations; ``runtime_reason`` says why this runtime was chosen. It and the next two are
            known once the ranks are connected.
        groups: The ranks of each host.
        tuning_table: The table of ``dtcomm tune`` that rank 0 brought; empty if there is none.
        links: The text of the file of DTCOMM_TOPOLOGY that rank 0 brought; empty if there is none.
        device: The device of the tensors; None is the CPU.
        plans: Prepared plans by the arguments of a call. ``dtcomm.collectives`` fills it.
        counter: Counts the calls.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        members: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        all_ranks = dist.get_process_group_ranks(group)
        positions = range(len(all_ranks)) if members is None else members
        self.ranks: list[int] = [all_ranks[position] for position in positions]
        self.rank = positions.index(dist.get_rank(group))
        self.size = len(self.ranks)
        self.id = f"{getattr(group, 'group_name', '')}/{name}"  # and the epoch, once the ranks agree on it
        self.global_rank = self.ranks[self.rank]
        self.names = [f"rank {rank}" for rank in self.ranks]
        self.checksum = env.get("DTCOMM_CHECKSUM") == "1"
        self.counter = _C.CallCounter()
        self.plans = PlanCache()
        self.runtime: Runtime = SingleRankRuntime()
        self.runtime_reason = "one rank: nothing to move"
        self.connection: Connecting | None = None
        self.groups: tuple[tuple[int, ...], ...] = ((0,),)
        self.tuning_table = ""
        self.links = ""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._init_error = ""
        self._timeout: timedelta | None = None
        if self.size > 1:
            self.runtime_reason = "the ranks are not connected yet"
            flight_recorder.add(self)

    def connect(self) -> None:
        """Wait until the ranks are connected; all of them have to call this or a collective.

        It raises what `dtcomm.runtime.bootstrap.Connection.wait` does.
        """
        connection = self.connection
        if connection is not None:
            connection.wait()

    def join(self, bootstrap: Bootstrap) -> None:
        """Let the ranks agree on a runtime, and take it; raises what the bootstrap raises."""
        try:
            try:
                bootstrap.join()
            finally:  # a flight record of a failed bootstrap contains what is known by then
                self.id += f"/{bootstrap.epoch}"
                self.names, self.groups = bootstrap.names, bootstrap.groups
                self.tuning_table, self.links = bootstrap.tuning_table, bootstrap.links
                self.runtime_reason = bootstrap.reason
            assert bootstrap.runtime is not None
            self.runtime = bootstrap.runtime
        except DtcommError as error:
            self._init_error = f"the communicator could not be made: {error}"
            flight_recorder.failed(error)
            raise

    def connected(self) -> None:
        """Let calls use the runtime directly from now on."""
        assert self.connection is not None
        if self._timeout is not None:
            self.runtime.set_timeout(self._timeout.total_seconds())
        self.plans, self.connection = self.connection.plans, None

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self.counter.value

    @property
    def hosts(self) -> int:
        """The number of hosts that the ranks are on."""
        return len(self.groups)

    def group_rank(self, global_rank: int, argument: str) -> int:
        """The position of a global rank in the group; ValueError that lists the ranks if it is not in the group."""
        return position(self.ranks, global_rank, argument)

    def next_seed(self, seed: int | None) -> int:
        """The seed of a call: the caller's, or else the number of the call."""
        number = self.counter.next()
        return number if seed is None else seed & (2**64 - 1)

    def scratch(self, size: int) -> torch.Tensor:
        """At least `size` bytes that a call may use from its first operation to its last: calls run in issue order.

        The native engine's are shared, so that peers read them without a staging copy.
        """
        if self._scratch.numel() < size:
            try:
                shares = self.runtime.name == "native"
                self._scratch = empty_shared(torch.Size([size]), torch.uint8) if shares else self._scratch
            except (OSError, RuntimeError):  # no descriptor is left: the engine makes the copies
                pass
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._scratch

    def info(self) -> dict[str, Any]:
        """The runtime, why it was chosen, and its own report."""
        info = {
            "runtime": "none",
            "reason": self.runtime_reason,
            "ranks": self.ranks,
            "hosts": self.hosts,
            **self.runtime.info(),
        }
        sent_to = info.pop("sent_to", None)
        if sent_to is not None:
            here = next(ranks for ranks in self.groups if self.rank in ranks)
            info["leaving_bytes"] = sum(sent for rank, sent in enumerate(sent_to) if rank not in here)
        elif self.hosts in (1, self.size):
            info["leaving_bytes"] = 0 if self.hosts == 1 else info.get("wire_bytes", 0)
        return info

    def record(self) -> dict[str, Any]:
        """The communicator's state and last operations, for the flight recorder."""
        runtime = self.runtime
        return {
            "id": self.id,
            "ranks": self.ranks,
            "names": self.names,
            "runtime": runtime.name,
            "failure": self._init_error or runtime.failure,
            "connecting": self.connection is not None and not self._init_error,
            "operations": flight_recorder.describe(runtime.flight_entries(), self.ranks),
            "seen": [
                {"rank": rank, **vars(snapshot)}
                for rank, snapshot in zip(self.ranks, runtime.peer_snapshots(), strict=False)
            ],
        }

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later calls wait for the other ranks."""
        self._timeout = timeout
        self.runtime.set_timeout(timeout.total_seconds())

    def close(self) -> None:
        """Release the runtime; later calls on the group make a new communicator."""
        flight_recorder.drop(self)
        self.plans.clear()
        connection = self.connection
        if connection is None or not connection.cancel():
            self.runtime.close()


@dataclass(frozen=True)
class Channel:
    """The ranks of a group with a communicator of their own for CPU tensors; collectives take it in place of a group.

    Who starts collectives from a thread needs one: the order of its calls among those of other threads is left to the
    clock, and differs between ranks. Calls on devices use the group's communicators, as no thread queues those.

    Attributes:
        group: The process group.
        name: Distinguishes it from the group's other channels; equal on all ranks.
    """

    group: dist.ProcessGroup
    name: str


@dataclass
class GroupEntry:
    """The communicators of one process group.

    ``communicator`` serves CPU tensors, ``devices`` those of each device, ``channels`` those of each `Channel`, by
    name, and ``pairs`` the messages to or from a peer, by its global rank, the direction and their purpose.
    """

    reference: weakref.ref[dist.ProcessGroup]
    communicator: Communicator | None = None
    channels: dict[str, Communicator] = field(default_factory=dict)
    devices: dict[torch.device, Communicator] = field(default_factory=dict)
    pairs: dict[tuple[int, bool, str], Communicator] = field(default_factory=dict)

    def forget(self, failed: Communicator) -> None:
        """Let the next call make another communicator in place of one whose ranks could not be connected."""
        with _lock:
            if self.communicator is failed:
                self.communicator = None
            self.channels = {key: made for key, made in self.channels.items() if made is not failed}
            self.devices = {key: made for key, made in self.devices.items() if made is not failed}
            self.pairs = {key: made for key, made in self.pairs.items() if made is not failed}

    def communicators(self) -> list[Communicator]:
        """All communicators."""
        communicators = [*self.pairs.values(), *self.channels.values(), *self.devices.values()]
        return communicators + ([self.communicator] if self.communicator else [])


MakeConnection = Callable[
    [Communicator, dist.ProcessGroup, str, bool, Callable[[Communicator], None]], Connecting
]
"""``make(communicator, group, name, is_pair, failed)``: return what connects the ranks; see `bootstrap`."""

_make_connection: MakeConnection

_EXIT_SECONDS = 2.0
_exiting = False
_lock = threading.RLock()
_cache: dict[int, GroupEntry] = {}
_abandoned: list[GroupEntry] = []  # a forked child keeps its parent's entries so that nothing is finalized


def connect_with(make: MakeConnection) -> None:
    """Let ``make`` give each later communicator of several ranks what connects them; called by `dtcomm.runtime`."""
    global _make_connection
    _make_connection = make


def get_communicator(group: dist.ProcessGroup | Channel | None) -> Communicator:
    """The group's communicator for CPU tensors. Its ranks may not be connected yet.

    Raises what ``require_group`` raises.
    """
    if isinstance(group, Channel):
        return _in_channel(group)
    target: Any = torch_compat.default_group() if group is None else group
    entry = _cache.get(id(target))
    if entry is not None and entry.reference() is target and target in torch_compat.all_groups():
        communicator = entry.communicator
        if communicator is not None:
            return communicator
    sweep()  # a call on a destroyed group fails below: its peers must not wait for this rank
    usable = require_group(group)
    entry = group_entry(usable)
    with _lock:
        if entry.communicator is None:
            entry.communicator = _new(usable, entry, "cpu")
        return entry.communicator


def get_communicator_for(
    group: dist.ProcessGroup | Channel | None, tensor: Any, argument: str
) -> Communicator:
    """The group's communicator for the device of ``tensor``; ValueError if that is neither the CPU nor CUDA."""
    # Callers refuse what is no tensor with a better message.
    if not isinstance(tensor, torch.Tensor) or tensor.is_cpu:
        return get_communicator(group)
    if isinstance(group, Channel):
        group = group.group
    return get_communicator_for_device(group, tensor.device, argument)


def get_communicator_for_device(
    group: dist.ProcessGroup | None, device: torch.device, argument: str = "device"
) -> Communicator:
    """The group's communicator for tensors of a device; ValueError if that is neither the CPU nor CUDA."""
    if device.type == "cpu":
        return get_communicator(group)
    if device.type != "cuda":
        raise ValueError(f"{argument}: is on {device}; valid: tensors on the CPU and on CUDA devices")
    target = require_group(group)
    entry = group_entry(target)
    with _lock:
        if device not in entry.devices:
            entry.devices[device] = _new(target, entry, device.type, device=device)
        return entry.devices[device]


def get_communicator_of_pair(
    group: dist.ProcessGroup | None,
    peer: int,
    argument: str,
    sends: bool,
    purpose: str = "",
    device: torch.device | None = None,
) -> Communicator:
    """The communicator of the messages from this rank to a peer, a global rank, or from the peer.

    Messages of different purposes use different communicators, and so do devices; None is the CPU. ValueError, which
    calls the peer ``argument``, if it is not in the group, or this rank.
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
    # The reference is None once torch has freed the group.
    _drop(lambda entry: entry.reference() not in groups)


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
        communicator.connection = _make_connection(
            communicator, group, name, members is not None, entry.forget
        )
    return communicator


def _in_channel(channel: Channel) -> Communicator:
    group = require_group(channel.group)
    entry = group_entry(group)
    with _lock:
        if channel.name not in entry.channels:
            entry.channels[channel.name] = _new(group, entry, channel.name)
        return entry.channels[channel.name]


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
