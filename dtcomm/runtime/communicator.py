"""Communicators: what dtcomm keeps for a process group, made at the first call and gone with the group."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import env
from dtcomm.errors import DtcommError
from dtcomm.runtime import work
from dtcomm.runtime.meeting import Meeting, host_id, require_equal
from dtcomm.runtime.shape import Shape
from dtcomm.runtime.shm import Buffers, NativeRuntime
from dtcomm.runtime.work import Work
from dtcomm.schedule import Schedule

PROTOCOL = 1  # what ranks say to each other when they meet, and the layout of shared areas


class Runtime(Protocol):
    """What moves the bytes of one group."""

    name: str

    def prepare(self, shape: Shape, schedule: Schedule) -> Any:
        """A plan for calls of this shape, to be kept and reused."""

    def run(self, plan: Any, buffers: Sequence[Buffers], seed: int) -> int:
        """Run to the end; returns the bytes this rank sent."""

    def submit(
        self, plan: Any, buffers: Sequence[Buffers], outputs: Sequence[torch.Tensor], seed: int
    ) -> Work:
        """Queue behind what runs already."""

    def close(self) -> None:
        """Release everything."""

    def info(self) -> dict[str, Any]:
        """For reports."""


class Communicator:
    """The ranks of one process group, and the runtime that serves them.

    ``rank`` counts within the group; ``ranks`` lists the global ranks. ``why`` says why the runtime is the
    one it is. ``plans`` belongs to ``dtcomm.collectives``.
    """

    def __init__(self, group: dist.ProcessGroup, epoch: int) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.size = len(self.ranks)
        self.calls = 0
        self.plans: dict[Hashable, Any] = {}
        self.runtime: Runtime | None = None
        self.why = "one rank: nothing to move"
        self.hosts = 1
        if self.size > 1:
            self._meet(group, epoch)

    def _meet(self, group: dist.ProcessGroup, epoch: int) -> None:
        timeout = group_timeout(group)
        meeting = Meeting(_store(group), f"dtcomm/{PROTOCOL}/{epoch}", self.rank, self.size, timeout)
        native = NativeRuntime(self.rank, self.size, timeout.total_seconds())
        try:
            words = meeting.exchange(
                {
                    "address": native.address(),
                    "host": host_id(),
                    "name": f"rank {self.ranks[self.rank]} (host {socket.gethostname()}, pid {os.getpid()})",
                    "protocol": PROTOCOL,
                    "variables": env.shared(),
                    "cores": sorted(os.sched_getaffinity(0)),
                }
            )
            require_equal(words, "protocol", "the version of dtcomm")
            require_equal(words, "variables", "DTCOMM_ variables")
            self.hosts = len({word["host"] for word in words})
            trouble = self._attach(native, words)
            said = [word["trouble"] for word in meeting.exchange({"trouble": trouble})]
            found = [f"{words[rank]['name']}: {what}" for rank, what in enumerate(said) if what]
            if not found:
                self.runtime = native
                self.why = "all ranks share this host's memory"
            elif env.get("DTCOMM_RUNTIME") == "native":
                raise DtcommError(f"DTCOMM_RUNTIME=native, but {found[0]}")
            else:
                self.why = found[0]
        finally:
            if self.runtime is None:
                native.close()
        meeting.close()
        if self.runtime is None:
            from dtcomm.runtime.process_group import ProcessGroupRuntime

            names = [word["name"] for word in words]
            self.runtime = ProcessGroupRuntime(self._private_group(group), names, timeout.total_seconds())

    def _attach(self, native: NativeRuntime, words: Sequence[dict[str, Any]]) -> str:
        """What keeps the ranks from sharing memory; empty where nothing does."""
        if env.get("DTCOMM_RUNTIME") == "process_group":
            return "DTCOMM_RUNTIME=process_group"
        if self.hosts > 1:
            return f"the ranks are on {self.hosts} hosts"
        cores = len(set[int]().union(*(word["cores"] for word in words)))
        try:
            native.attach([word["address"] for word in words], [word["name"] for word in words], cores=cores)
        except (OSError, RuntimeError) as error:
            return f"cannot map a peer's memory: {error}"
        return ""

    def _private_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A group of our own over the same ranks: our messages never mix with the user's."""
        made: dist.ProcessGroup = dist.new_group(
            self.ranks,
            timeout=group_timeout(group),
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc="dtcomm",
        )
        return made

    def group_rank(self, global_rank: int, argument: str) -> int:
        """Position of a global rank in the group; ValueError that lists the ranks where it is not in it."""
        try:
            return self.ranks.index(global_rank)
        except ValueError:
            raise ValueError(
                f"{argument}: rank {global_rank} is not in the group; its ranks are {_listing(self.ranks)}"
            ) from None

    def next_seed(self, seed: int | None) -> int:
        """The seed of a call: the caller's, or the call's number."""
        self.calls += 1
        return self.calls if seed is None else seed & (2**64 - 1)

    def info(self) -> dict[str, Any]:
        """Runtime, why, and what the runtime tells of itself."""
        base = {"runtime": "none", "why": self.why, "ranks": self.ranks, "hosts": self.hosts}
        return base if self.runtime is None else {**base, **self.runtime.info()}

    def close(self) -> None:
        """Release the runtime; later calls on the group make a new communicator."""
        self.plans.clear()
        if self.runtime is not None:
            self.runtime.close()


_lock = threading.RLock()
_cache: dict[int, tuple[weakref.ref[dist.ProcessGroup], Communicator]] = {}
_inherited: set[int] = set()  # groups of the process this one was forked from
_abandoned: list[Communicator] = []


def find(group: dist.ProcessGroup | None) -> Communicator:
    """The group's communicator, made if need be (then all ranks of the group must call).

    Raises ValueError where torch.distributed is not initialised, the group is destroyed or this process is
    not in it, and DtcommError in a forked child of the process that made it.
    """
    world: Any = c10d._world
    target: Any = world.default_pg if group is None else group
    entry = _cache.get(id(target))
    if entry is not None and entry[0]() is target and target in world.pg_map:
        return entry[1]
    return _make(target)


def _make(group: Any) -> Communicator:
    if group is None:
        raise ValueError(
            "group: torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    if id(group) in _inherited:
        raise DtcommError(
            "group: this process was forked from one that uses dtcomm; communicators do not survive a fork: "
            "start ranks with torchrun or multiprocessing's spawn"
        )
    world: Any = c10d._world
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"group: rank {dist.get_rank()} is not in this group")
        raise TypeError(f"group: expected a ProcessGroup or None, got {type(group).__name__}")
    if group not in world.pg_map:
        raise ValueError("group: this process group has been destroyed")
    with _lock:
        sweep()
        # Counted in the store itself: an id of one that is gone may come again, and not on every rank.
        epoch = _store(group).add(f"dtcomm/{PROTOCOL}/made/{dist.get_rank(group)}", 1)
        communicator = Communicator(group, epoch)
        key = id(group)
        _cache[key] = (weakref.ref(group, lambda _: _drop(key)), communicator)
        return communicator


def sweep() -> None:
    """Release the communicators of groups that are destroyed."""
    world: Any = c10d._world
    with _lock:
        for key, (reference, _) in list(_cache.items()):
            group = reference()
            if group is None or group not in world.pg_map:
                _drop(key)


def release(group: dist.ProcessGroup | None = None) -> None:
    """Tear down the group's communicator now, if there is one; a later call makes a new one.

    Every rank of the group should call it: peers that still wait for this rank raise PeerLost.
    """
    world: Any = c10d._world
    target: Any = world.default_pg if group is None else group
    _drop(id(target))


def _drop(key: int) -> None:
    with _lock:
        entry = _cache.pop(key, None)
    if entry is not None:
        entry[1].close()


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the group was made with."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except RuntimeError:  # no backend for this device
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return dist.default_pg_timeout


def _store(group: dist.ProcessGroup) -> c10d.Store:
    world: Any = c10d._world
    store: c10d.Store = world.pg_map[group][1]
    return store


def _listing(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")


def _after_fork() -> None:
    """A child has neither the threads nor the mappings of its parent: its communicators are not touched
    again.
    """
    world: Any = c10d._world
    _inherited.update(id(group) for group in world.pg_map)
    _abandoned.extend(communicator for _, communicator in _cache.values())
    _cache.clear()


@atexit.register
def _shutdown() -> None:
    for key in list(_cache):
        _drop(key)
    if not _inherited:
        work.stop()


os.register_at_fork(after_in_child=_after_fork)
