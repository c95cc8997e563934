"""Communicator: the ranks of one process group and the runtime that executes their operations.

``dtcomm.runtime.communicator_cache`` makes communicators and keeps them with their process groups. A group of one rank
has a :class:`SingleRankRuntime`; the runtimes of larger groups come from ``dtcomm.runtime.bootstrap``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dtcomm import _C, env
from dtcomm.errors import DtcommError
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.flight_recorder import FlightEntry, PeerSnapshot
from dtcomm.runtime.plans import PlanCache
from dtcomm.runtime.process_groups import position
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks, OpSpec, Runtime
from dtcomm.schedule import Schedule
from dtcomm.work import CompositeWork, Work


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
    operations until the ranks are connected.

    Attributes:
        rank, size: This rank and the number of ranks, within the group.
        ranks: The global rank of each rank.
        names: How error messages name each rank.
        connection: What connects the ranks; None once they are connected.
        runtime: What executes operations; ``runtime_reason`` says why this runtime was chosen. It and the next two are
            known once the ranks are connected.
        groups: The ranks of each host.
        tuning_table: The table of ``dtcomm tune`` that rank 0 brought; empty if there is none.
        links: The text of the file of DTCOMM_LINKS that rank 0 brought; empty if there is none.
        device: The device of the tensors; None is the CPU.
        plans: Prepared plans by the arguments of a call. ``dtcomm.collectives`` fills it.
        counter: Counts the calls.

    Args:
        group: The process group.
        name: Distinguishes it from the group's other communicators; equal on all ranks.
        members: The group ranks that take part, in order; None: all.
        device: The device of the tensors; None: the CPU.
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

        Raises:
            CollectiveTimeout: If a rank does not come before the group's timeout.
            PeerLost: If the process of a rank is known to have ended.
            CommunicatorClosed: If the communicator was closed meanwhile.
            DtcommError: If the ranks cannot agree on a runtime.
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
        """At least `size` bytes that a call may use from its first operation to its last: calls run in issue order."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._scratch

    def info(self) -> dict[str, Any]:
        """The runtime, why it was chosen, and its own report."""
        return {
            "runtime": "none",
            "reason": self.runtime_reason,
            "ranks": self.ranks,
            "hosts": self.hosts,
            **self.runtime.info(),
        }

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


class SingleRankRuntime:
    """Executes operations of one rank. A codec is not applied: nothing is sent, so nothing is lost."""

    name = "none"
    failure = ""
    table_bytes = 0

    def prepare(self, spec: OpSpec, schedule: Schedule) -> SingleRankRuntime:
        """The runtime itself: copies need no plan."""
        return self

    def run(self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Copy every input that is not already its output; returns 0, the bytes sent."""
        hooks = hooks or NO_HOOKS
        for task in hooks.before:
            task()
        for part in buffers:
            if part.input is not None and part.output is not None and part.output is not part.input:
                part.output.copy_(part.input.view_as(part.output))
        for task in hooks.after:
            task()
        return 0

    def submit(
        self,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> CompositeWork:
        """As ``run``: there is nothing to wait for."""
        self.run(buffers, seed, hooks)
        return CompositeWork((), outputs)

    def set_timeout(self, seconds: float) -> None:
        """Do nothing: no other rank is waited for."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def info(self) -> dict[str, Any]:
        """The runtime's name."""
        return {"runtime": self.name}

    def flight_entries(self) -> list[FlightEntry]:
        """An empty list: a single rank records no operations."""
        return []

    def peer_snapshots(self) -> list[PeerSnapshot]:
        """An empty list: there are no peers."""
        return []
