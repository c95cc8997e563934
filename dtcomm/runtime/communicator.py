"""Communicators: what dtcomm keeps for a process group, made at the first call and gone with the group."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import _C, env
from dtcomm.errors import DtcommError
from dtcomm.kernels import dispatch
from dtcomm.runtime import flight, link, work
from dtcomm.runtime.around import Around
from dtcomm.runtime.groups import group_store, group_timeout, inherited, position, require_group
from dtcomm.runtime.meeting import Meeting, host_id, require_equal
from dtcomm.runtime.sealed import Wire
from dtcomm.runtime.shape import Shape
from dtcomm.runtime.shm import MESSAGE_SLOT_BYTES, Buffers, NativeRuntime
from dtcomm.runtime.sockets import Door
from dtcomm.runtime.work import Work
from dtcomm.schedule import Schedule

PROTOCOL = 2  # what ranks say to each other when they meet, and the layout of shared areas


class Runtime(Protocol):
    """What moves the bytes of one group."""

    name: str

    def prepare(self, shape: Shape, schedule: Schedule) -> Any:
        """A plan for calls of this shape, to be kept and reused."""

    def run(self, plan: Any, buffers: Sequence[Buffers], seed: int, around: Around | None = None) -> int:
        """Run to the end; returns the bytes this rank sent."""

    def submit(
        self,
        plan: Any,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        around: Around | None = None,
    ) -> Work:
        """Queue behind what runs already."""

    def set_timeout(self, seconds: float) -> None:
        """How long the calls from now on wait for the other ranks."""

    def close(self) -> None:
        """Release everything."""

    def info(self) -> dict[str, Any]:
        """For reports."""

    @property
    def failure(self) -> str:
        """Why every call raises; empty where none does."""

    def flights(self) -> list[flight.Flight]:
        """The last operations, oldest first."""

    def sightings(self) -> list[flight.Sighting]:
        """What is to be seen of every rank, in rank order; empty where nothing is."""


class Communicator:
    """The ranks of one process group, and the runtime that serves them.

    ``rank`` counts within the group; ``ranks`` lists the global ranks. ``why`` says why the runtime is the
    one it is; ``groups`` the group's ranks on each host; ``table`` what rank 0 brought of `dtcomm tune`. ``plans``
    belongs to ``dtcomm.collectives``.

    ``scratch`` serves calls whose terms are made before they are sent.

    ``members``, group ranks in order, are those that take part, by default all; ``epoch`` tells one meeting of
    theirs from the next.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        epoch: int | str,
        members: Sequence[int] | None = None,
        store: c10d.Store | None = None,
    ) -> None:
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
        self._paired = store is not None
        self.calls = 0
        self.plans: dict[Hashable, Any] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.runtime: Runtime | None = None
        self.why = "one rank: nothing to move"
        self.groups: tuple[tuple[int, ...], ...] = ((0,),)
        self.table = ""
        if self.size > 1:
            flight.add(self)
            try:
                self._meet(group, epoch, group_store(group) if store is None else store)
            except DtcommError as error:
                self._trouble = f"the communicator could not be made: {error}"
                flight.failed(error)
                raise

    @property
    def hosts(self) -> int:
        """How many hosts the ranks are on."""
        return len(self.groups)

    def _meet(self, group: dist.ProcessGroup, epoch: int | str, store: c10d.Store) -> None:
        timeout = group_timeout(group)
        meeting = Meeting(store, f"dtcomm/{PROTOCOL}/{epoch}", self.rank, self.ranks, timeout)
        native = NativeRuntime(self.rank, self.size, timeout.total_seconds())
        door, closed = _door()
        try:
            words = meeting.exchange(
                {
                    "address": native.address(),
                    "door": {"closed": closed} if door is None else door.word(),
                    "host": host_id(),
                    "name": f"rank {self.ranks[self.rank]} (host {socket.gethostname()}, pid {os.getpid()})",
                    "protocol": PROTOCOL,
                    "variables": env.shared(),
                    "machine": link.machine(),
                    "cores": sorted(os.sched_getaffinity(0)),
                    "table": env.tune_text() if self.rank == 0 else "",
                }
            )
            require_equal(words, "protocol", "the version of dtcomm")
            require_equal(words, "variables", "DTCOMM_ variables")
            links = link.links()
            if links and len({word["machine"] for word in words}) > 1:
                raise DtcommError(
                    "DTCOMM_LINK: emulated links join processes of one machine; these ranks are on more"
                )
            self.names = [word["name"] for word in words]
            self.table = words[0]["table"]
            hosts: dict[str, list[int]] = {}
            for rank, word in enumerate(words):
                hosts.setdefault(word["host"], []).append(rank)
            self.groups = tuple(map(tuple, hosts.values()))
            if self._crosses_sockets():  # pieces of another size
                native.close()
                native = NativeRuntime(self.rank, self.size, timeout.total_seconds(), MESSAGE_SLOT_BYTES)
                for word, more in zip(words, meeting.exchange({"address": native.address()}), strict=True):
                    word.update(more)
            trouble = self._attach(native, words, door, timeout.total_seconds())
            pulls = trouble or native.why_no_single_copy()
            answers = meeting.exchange({"trouble": trouble, "pulls": pulls})
            said = [word["trouble"] for word in answers]
            found = [f"{words[rank]['name']}: {what}" for rank, what in enumerate(said) if what]
            if not found:
                native.single_copy = next((word["pulls"] for word in answers if word["pulls"]), "")
                if native.single_copy and env.get("DTCOMM_SINGLE_COPY") == "on":
                    raise DtcommError(f"DTCOMM_SINGLE_COPY=on, but {native.single_copy}")
                self.runtime = native
                self.why = self._how()
            elif forced := _forced():
                raise DtcommError(f"{forced}, but {found[0]}")
            else:
                self.why = found[0]
        finally:
            if door is not None:
                door.close()
            if self.runtime is None:
                native.close()
        meeting.close()
        if self.runtime is None:
            from dtcomm.runtime.process_group import ProcessGroupRuntime

            private = self._private_group(group, store, str(epoch))
            blames = c10d.PrefixStore(f"dtcomm/{PROTOCOL}/{epoch}", store)
            self.runtime = ProcessGroupRuntime(
                private, self.names, timeout.total_seconds(), blames, self._wires(links)
            )

    def _crosses_sockets(self) -> bool:
        """Whether some ranks are to reach others through sockets: the same answer on all."""
        if env.get("DTCOMM_RUNTIME") == "process_group":
            return False
        return self.hosts > 1 or env.get("DTCOMM_TRANSPORT") == "sockets"

    def _attach(
        self, native: NativeRuntime, words: Sequence[dict[str, Any]], door: Door | None, timeout_s: float
    ) -> str:
        """What keeps the engine from serving the ranks; empty where nothing does."""
        if env.get("DTCOMM_RUNTIME") == "process_group":
            return "DTCOMM_RUNTIME=process_group"
        inside = next(group for group in self.groups if self.rank in group)
        near = () if env.get("DTCOMM_TRANSPORT") == "sockets" else inside
        far = {
            rank: word["door"] for rank, word in enumerate(words) if rank != self.rank and rank not in near
        }
        if self.hosts > 1 and env.get("DTCOMM_TRANSPORT") == "memory":
            return f"the ranks are on {self.hosts} hosts"
        if far and dispatch.current() == "reference":
            return "the reference kernels are in force, which the engine does not run"
        sockets: dict[int, int] = {}
        try:
            if far:
                for rank, word in [(self.rank, words[self.rank]["door"]), *far.items()]:
                    if "closed" in word:
                        return f"{words[rank]['name']} cannot be connected to: {word['closed']}"
                assert door is not None
                sockets = door.connect(self.rank, far, self.names, timeout_s)
            cores = len(set[int]().union(*(words[rank]["cores"] for rank in inside)))
            native.attach(
                [word["address"] for word in words], self.names, cores=cores, sockets=sockets, inside=inside
            )
        except (OSError, RuntimeError) as error:
            return f"cannot {'connect to' if far and not sockets else 'map the memory of'} a peer: {error}"
        return ""

    def _how(self) -> str:
        assert self.runtime is not None
        transport = self.runtime.info()["transport"]
        if transport == "memory":
            return "all ranks share this host's memory"
        if self.hosts > 1:
            return f"the ranks are on {self.hosts} hosts: {transport}"
        return f"DTCOMM_TRANSPORT={env.get('DTCOMM_TRANSPORT')}"

    def _wires(self, links: link.Links) -> list[Wire | None]:
        """The emulated link to each rank."""
        inside = next(group for group in self.groups if self.rank in group)
        wires: list[Wire | None] = []
        for rank in range(self.size):
            level = 0 if rank in inside else 1
            found = links.between if level else links.inside
            wires.append(None if found is None or rank == self.rank else Wire(_C.Nic(level), found))
        return wires

    def _private_group(self, group: dist.ProcessGroup, store: c10d.Store, epoch: str) -> Any:
        """A group of our own over the same ranks: our messages never mix with the user's."""
        if dist.get_backend(group) in ("gloo", "dtcomm"):
            # Past torch's registry: pairs are made in threads, several at once, and a second group of the same
            # ranks would get the first one's name and read its addresses.
            return dist.ProcessGroupGloo(
                c10d.PrefixStore(f"dtcomm/{PROTOCOL}/{epoch}/gloo", store),
                self.rank,
                self.size,
                group_timeout(group),
            )
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
        return position(self.ranks, global_rank, argument)

    def next_seed(self, seed: int | None) -> int:
        """The seed of a call: the caller's, or the call's number."""
        self.calls += 1
        return self.calls if seed is None else seed & (2**64 - 1)

    def scratch(self, size: int) -> torch.Tensor:
        """At least `size` bytes that every call may use from its first operation to its last: calls run in order."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
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
            "operations": [] if runtime is None else flight.describe(runtime.flights(), self.ranks),
        }
        seen = [] if runtime is None else runtime.sightings()
        said["seen"] = [{"rank": rank, **vars(each)} for rank, each in zip(self.ranks, seen, strict=False)]
        return said

    def set_timeout(self, timeout: timedelta) -> None:
        """How long the calls from now on wait for the other ranks."""
        if self.runtime is not None:
            self.runtime.set_timeout(timeout.total_seconds())

    def close(self) -> None:
        """Release the runtime; later calls on the group make a new communicator."""
        flight.drop(self)
        self.plans.clear()
        if self.runtime is not None:
            self.runtime.close()


def _door() -> tuple[Door | None, str]:
    """Where ranks of other hosts connect to, or why they cannot."""
    if env.get("DTCOMM_RUNTIME") == "process_group" or env.get("DTCOMM_TRANSPORT") == "memory":
        return None, "its variables say so"
    try:
        return Door(), ""
    except OSError as error:
        return None, str(error)


def _forced() -> str:
    """The variable that rules the group's own backend out; empty where none does."""
    for name, choices in (("DTCOMM_RUNTIME", ("native",)), ("DTCOMM_TRANSPORT", ("memory", "sockets"))):
        if env.get(name) in choices and env.get("DTCOMM_RUNTIME") != "process_group":
            return f"{name}={env.get(name)}"
    return ""


class Closeable(Protocol):
    """What goes with a group."""

    def close(self) -> None:
        """Release everything."""


@dataclass
class Entry:
    """What is kept for a group: the communicator of all its ranks, and those of pairs by the peer's global rank and
    what they are for.
    """

    reference: weakref.ref[dist.ProcessGroup]
    communicator: Communicator | None = None
    pairs: dict[tuple[int, str], Any] = field(default_factory=dict)
    making: threading.RLock = field(default_factory=threading.RLock)

    def close(self) -> None:
        kept: list[Closeable] = [*self.pairs.values(), *([self.communicator] if self.communicator else [])]
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
