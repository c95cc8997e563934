"""Communicators: what dtcomm keeps for a process group, made at the first call and gone with the group."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import env
from dtcomm.errors import DtcommError
from dtcomm.runtime import flight_recorder, work
from dtcomm.runtime.bootstrap.cpu import PROTOCOL, CpuBootstrap
from dtcomm.runtime.process_groups import group_store, inherited, position, require_group
from dtcomm.runtime.types import Runtime


class Communicator:
    """The ranks of one process group, and the runtime that serves them.

    ``rank`` counts within the group; ``ranks`` lists the global ranks. ``why`` says why the runtime is the
    one it is; ``groups`` the group's ranks on each host; ``table`` what rank 0 brought of `dtcomm tune`. ``plans``
    belongs to ``dtcomm.collectives``.

    ``scratch`` serves calls whose terms are made before they are sent.

    ``members``, group ranks in order, are those that take part, by default all; ``epoch`` tells one meeting of
    theirs from the next. ``device`` is where the tensors are, by default the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        epoch: int | str,
        members: Sequence[int] | None = None,
        store: c10d.Store | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        everybody = dist.get_process_group_ranks(group)
        members = range(len(everybody)) if members is None else members
        self.ranks: list[int] = [everybody[member] for member in members]
        self.rank = members.index(dist.get_rank(group))
        self.size = len(self.ranks)
        self.id = f"{getattr(group, 'group_name', '')}/{epoch}"
        self.global_rank = self.ranks[self.rank]
        self.names = [f"rank {rank}" for rank in self.ranks]
        self.checksum = env.get("DTCOMM_CHECKSUM") == "1"
        self._trouble = ""
        self.calls = 0
        self.plans: dict[Hashable, Any] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.runtime: Runtime[Any] | None = None
        self.why = "one rank: nothing to move"
        self.groups: tuple[tuple[int, ...], ...] = ((0,),)
        self.table = ""
        if self.size > 1:
            flight_recorder.add(self)
            try:
                joining = _joining(self.rank, self.ranks, group, epoch, store, device)
                try:
                    joining.meet()
                finally:  # what is known by then, the flight record says too
                    self.names, self.groups, self.table = joining.names, joining.groups, joining.table
                    self.runtime, self.why = joining.runtime, joining.why
            except DtcommError as error:
                self._trouble = f"the communicator could not be made: {error}"
                flight_recorder.failed(error)
                raise

    @property
    def hosts(self) -> int:
        """How many hosts the ranks are on."""
        return len(self.groups)

    def group_rank(self, global_rank: int, argument: str) -> int:
        """Position of a global rank in the group; ValueError that lists the ranks where it is not in it."""
        return position(self.ranks, global_rank, argument)

    def next_seed(self, seed: int | None) -> int:
        """The seed of a call: the caller's, or the call's number."""
        self.calls += 1
        return self.calls if seed is None else seed & (2**64 - 1)

    def scratch(self, size: int) -> torch.Tensor:
        """At least `size` bytes that every call may use from its first operation to its last: calls run in order."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._scratch

    def info(self) -> dict[str, Any]:
        """Runtime, why, and what the runtime tells of itself."""
        base = {"runtime": "none", "why": self.why, "ranks": self.ranks, "hosts": self.hosts}
        return base if self.runtime is None else {**base, **self.runtime.info()}

    def record(self) -> dict[str, Any]:
        """For the flight recorder."""
        runtime = self.runtime
        said: dict[str, Any] = {
            "id": self.id,
            "ranks": self.ranks,
            "names": self.names,
            "runtime": "none" if runtime is None else runtime.name,
            "failure": self._trouble if runtime is None else runtime.failure,
            "operations": []
            if runtime is None
            else flight_recorder.describe(runtime.flight_entries(), self.ranks),
        }
        seen = [] if runtime is None else runtime.peer_snapshots()
        said["seen"] = [{"rank": rank, **vars(each)} for rank, each in zip(self.ranks, seen, strict=False)]
        return said

    def set_timeout(self, timeout: timedelta) -> None:
        """How long the calls from now on wait for the other ranks."""
        if self.runtime is not None:
            self.runtime.set_timeout(timeout.total_seconds())

    def close(self) -> None:
        """Release the runtime; later calls on the group make a new communicator."""
        flight_recorder.drop(self)
        self.plans.clear()
        if self.runtime is not None:
            self.runtime.close()


def _joining(
    rank: int,
    ranks: list[int],
    group: dist.ProcessGroup,
    epoch: int | str,
    store: c10d.Store | None,
    device: torch.device | None,
) -> CpuBootstrap:
    if device is None:
        return CpuBootstrap(rank, ranks, group, epoch, store)
    from dtcomm.runtime.bootstrap.cuda import CudaBootstrap

    return CudaBootstrap(device, rank, ranks, group, epoch, store)


class Closeable(Protocol):
    """What goes with a group."""

    def close(self) -> None:
        """Release everything."""


@dataclass
class Entry:
    """What is kept for a group: the communicator of all its ranks, those for tensors on devices, and those of pairs by
    the peer's global rank and what they are for.
    """

    reference: weakref.ref[dist.ProcessGroup]
    communicator: Communicator | None = None
    devices: dict[torch.device, Communicator] = field(default_factory=dict)
    pairs: dict[tuple[int, str], Any] = field(default_factory=dict)
    making: threading.RLock = field(default_factory=threading.RLock)

    def close(self) -> None:
        kept: list[Closeable] = [*self.pairs.values(), *self.devices.values()]
        kept += [self.communicator] if self.communicator else []
        for each in kept:
            each.close()


_lock = threading.RLock()
_cache: dict[int, Entry] = {}
_abandoned: list[Entry] = []


def find(group: dist.ProcessGroup | None) -> Communicator:
    """The group's communicator, made if need be (then all ranks of the group must call).

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


def find_for(group: dist.ProcessGroup | None, tensor: Any, argument: str) -> Communicator:
    """The group's communicator for tensors like this one; ValueError where there is none for its device."""
    if (
        not isinstance(tensor, torch.Tensor) or tensor.is_cpu
    ):  # what is no tensor is refused by whoever looks at it
        return find(group)
    device = tensor.device
    if device.type != "cuda":
        raise ValueError(f"{argument}: is on {device}; valid: tensors on the CPU and on CUDA devices")
    return _on_device(require_group(group), device)


def devices_of(group: dist.ProcessGroup | None) -> dict[str, Communicator]:
    """The communicators that were made for tensors on devices."""
    entry = _cache.get(id(require_group(group)))
    return {} if entry is None else {str(device): made for device, made in entry.devices.items()}


def _on_device(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    entry = entry_of(group)
    found = entry.devices.get(device)
    if found is None:
        with entry.making:
            if device not in entry.devices:
                made = group_store(group).add(
                    f"dtcomm/{PROTOCOL}/made/{device.type}/{dist.get_rank(group)}", 1
                )
                entry.devices[device] = Communicator(group, f"{made}/{device.type}", device=device)
            found = entry.devices[device]
    return found


def known(group: dist.ProcessGroup) -> Communicator | None:
    """The group's communicator if it has been made: asking needs no other rank."""
    entry = _cache.get(id(group))
    return entry.communicator if entry is not None and entry.reference() is group else None


def _make(group: dist.ProcessGroup) -> Communicator:
    entry = entry_of(group)
    with (
        entry.making
    ):  # of this group alone: while its ranks gather, messages of other groups and pairs go on
        if entry.communicator is None:
            # Counted in the store itself: an id of one that is gone may come again, and not on every rank.
            epoch = group_store(group).add(f"dtcomm/{PROTOCOL}/made/{dist.get_rank(group)}", 1)
            entry.communicator = Communicator(group, epoch)
        return entry.communicator


def entry_of(group: dist.ProcessGroup) -> Entry:
    """What is kept for a group that can be used."""
    with _lock:
        sweep()
        key = id(group)
        entry = _cache.get(key)
        if entry is None:
            entry = _cache[key] = Entry(weakref.ref(group, lambda _: _drop(key)))
        return entry


def sweep() -> None:
    """Release the communicators of groups that are destroyed."""
    world: Any = c10d._world
    with _lock:
        for key, entry in list(_cache.items()):
            group = entry.reference()
            if group is None or group not in world.pg_map:
                _drop(key)


def release(group: dist.ProcessGroup | None = None) -> None:
    """Tear down the group's communicators now, if there are any; a later call makes new ones.

    Every rank of the group should call it: peers that still wait for this rank raise PeerLost.
    """
    world: Any = c10d._world
    target: Any = world.default_pg if group is None else group
    _drop(id(target))


def _drop(key: int) -> None:
    with _lock:
        entry = _cache.pop(key, None)
    if entry is not None:
        entry.close()


def _after_fork() -> None:
    """A child has neither the threads nor the mappings of its parent: its communicators are not touched
    again.
    """
    world: Any = c10d._world
    inherited.update(id(group) for group in world.pg_map)
    _abandoned.extend(_cache.values())
    _cache.clear()


@atexit.register
def _shutdown() -> None:
    for key in list(_cache):
        _drop(key)
    if not inherited:
        work.stop()


os.register_at_fork(after_in_child=_after_fork)
