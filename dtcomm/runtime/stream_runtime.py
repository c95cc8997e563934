"""Base of the runtimes that queue operations on streams: order, flight records, and the state after a failure.

``torchdist.runtime`` and ``cuda_peer`` derive from it.
"""

from __future__ import annotations

import abc
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from dtcomm.errors import DtcommError
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.flight_recorder import CAPACITY, FlightEntry, PeerSnapshot, Recorder
from dtcomm.runtime.types import Buffers, OpHooks, OpSpec
from dtcomm.schedule import Schedule
from dtcomm.streams import StreamOrder, Streams, record_buffers
from dtcomm.work import Work


class StreamPlan(Protocol):
    """What every plan of these runtimes says of itself."""

    @property
    def table_bytes(self) -> int:
        """The memory that the plan itself takes."""


class RecordedPlan(StreamPlan, Protocol):
    """A plan, as far as the flight recorder and reports read it."""

    @property
    def text(self) -> str:
        """The operation as error messages show it."""

    @property
    def spec(self) -> OpSpec:
        """The operation that the plan was made for."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one call."""


PlanT = TypeVar("PlanT", bound=StreamPlan)


@dataclass(frozen=True)
class BoundPlan(Generic[PlanT]):
    """A plan and the two functions of its runtime that execute it."""

    plan: PlanT
    run: Callable[[Sequence[Buffers], int, OpHooks | None], int]
    submit: Callable[[Sequence[Buffers], Sequence[torch.Tensor], int, OpHooks | None], Work]

    @property
    def table_bytes(self) -> int:
        """The memory that the plan itself takes."""
        return self.plan.table_bytes


class StreamRuntime(abc.ABC, Generic[PlanT]):
    """Executes the operations of one communicator on ``streams``, in issue order."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._order = StreamOrder(streams)
        self._operations = 0
        self._wire_bytes = 0
        self._failure: DtcommError | None = None
        self._recorder = Recorder()
        self._queued: deque[tuple[FlightEntry, Any]] = deque(maxlen=CAPACITY)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # operations run in issue order

    def prepare(self, spec: OpSpec, schedule: Schedule) -> BoundPlan[PlanT]:
        """A plan for calls of this operation. Raises what ``make_plan`` raises."""
        plan = self.make_plan(spec, schedule)
        return BoundPlan(plan, partial(self.run, plan), partial(self.submit, plan))

    @abc.abstractmethod
    def make_plan(self, spec: OpSpec, schedule: Schedule) -> PlanT:
        """The plan of an operation, which ``run`` and ``submit`` take."""

    @abc.abstractmethod
    def run(self, plan: PlanT, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Run the operation of ``plan``; returns the bytes sent."""

    @abc.abstractmethod
    def submit(
        self,
        plan: PlanT,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue the operation of ``plan`` behind earlier ones; returns its handle."""

    @property
    def failure(self) -> str:
        """The error that every later call raises; empty if there is none."""
        return "" if self._failure is None else str(self._failure)

    def flight_entries(self) -> list[FlightEntry]:
        """The last operations, oldest first."""
        for entry, event in list(self._queued):  # other threads may queue more
            if entry.stage == "started" and self._streams.query(event):
                entry.stage = "done"
        return self._recorder.list()

    def peer_snapshots(self) -> list[PeerSnapshot]:
        """An empty list: the ranks share no host memory."""
        return []

    def _on_side_stream(self, buffers: Sequence[Buffers], hooks: OpHooks, queue: Callable[[], Any]) -> Any:
        """Call ``queue`` with the side stream current, behind the work of the caller's stream; returns its result."""
        streams = self._streams
        ready = streams.record()
        with streams.on(streams.side_stream()):
            streams.wait(ready)
            record_buffers(streams, [*buffers, *hooks.tensors()])
            return queue()

    def _execute(
        self, plan: RecordedPlan, operation: Callable[[], None], entry: FlightEntry | None = None
    ) -> Any:
        """Call ``operation``, which queues work on the current stream; returns the event behind that work.

        ``entry`` is the operation's flight record if it was issued earlier. After an error this and all later calls
        raise what ``_failure_of`` makes of it.
        """
        entry = entry or self._recorder.issue(plan.text, plan.spec.details())
        entry.started_ns = time.monotonic_ns()
        entry.stage = "started"
        self._order.before_op()
        try:
            operation()
        except BaseException as error:
            entry.stage = "failed"
            entry.finished_ns = time.monotonic_ns()
            failure = self._failure_of(error)
            if self._failure is None:  # else the operation had been given up
                self._failure = type(failure)(str(failure))  # without the frames of the one that is raised
                flight_recorder.failed(failure)
            if failure is error or not isinstance(error, Exception):
                raise
            raise failure from error
        event = self._order.after_op()
        if not self._streams.capturing():
            self._queued.append((entry, event))
        self._operations += 1
        self._wire_bytes += plan.sent_bytes
        return event

    def _failure_of(self, error: BaseException) -> DtcommError:
        """The error that calls raise once an operation has raised ``error``."""
        return error if isinstance(error, DtcommError) else DtcommError(f"an operation failed: {error!r}")

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise DtcommError("group: this process was forked from the one that made the communicator")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
