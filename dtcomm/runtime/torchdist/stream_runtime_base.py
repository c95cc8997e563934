"""What runtimes that queue their calls on streams have in common: order, records, and what a failure leaves behind."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dtcomm.device.streams import StreamOrder, Streams, record_buffers
from dtcomm.errors import DtcommError
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.flight_recorder import KEPT, FlightEntry, PeerSnapshot, Recorder
from dtcomm.runtime.types import Buffers, OpHooks, OpSpec


class Queueable(Protocol):
    """A plan, as far as it is recorded."""

    @property
    def text(self) -> str:
        """For people."""

    @property
    def spec(self) -> OpSpec:
        """What is called."""

    @property
    def sent_bytes(self) -> int:
        """Of one call, by this rank."""


class Streamed:
    """The calls of one communicator on ``streams``. The host waits for none of them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._order = StreamOrder(streams)
        self._operations = 0
        self._wire_bytes = 0
        self._failure: DtcommError | None = None
        self._recorder = Recorder()
        self._under_way: deque[tuple[FlightEntry, Any]] = deque(maxlen=KEPT)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # calls run in issue order

    @property
    def failure(self) -> str:
        """Why calls raise; empty where they do not."""
        return "" if self._failure is None else str(self._failure)

    def flight_entries(self) -> list[FlightEntry]:
        """The last operations, oldest first."""
        for noted, event in self._under_way:
            if noted.stage == "started" and self._streams.query(event):
                noted.stage = "done"
        return self._recorder.list()

    def peer_snapshots(self) -> list[PeerSnapshot]:
        """Nothing: the ranks share no memory of the host."""
        return []

    def _beside(self, buffers: Sequence[Buffers], hooks: OpHooks, queue: Callable[[], Any]) -> Any:
        """``queue`` on a stream of our own, after what the current one was given so far; returns what it returns."""
        streams = self._streams
        ready = streams.record()
        with streams.on(streams.side_stream()):
            streams.wait(ready)
            record_buffers(streams, [*buffers, *hooks.tensors()])
            return queue()

    def _enter(
        self, plan: Queueable, begin: Callable[[], None], broken: Callable[[BaseException], DtcommError]
    ) -> Any:
        """Queue what ``begin`` queues on the current stream; returns the event behind it.

        ``broken`` makes of what it raises the error that this and all later calls raise.
        """
        noted = self._recorder.issue(plan.text, plan.spec.details())
        noted.started_ns = time.monotonic_ns()
        noted.stage = "failed"  # unless it comes to something
        self._order.before_op()
        try:
            begin()
        except BaseException as error:
            self._failure = broken(error)
            flight_recorder.failed(self._failure)
            raise self._failure from error
        noted.stage = "started"
        done = self._order.after_op()
        if not self._streams.capturing():
            self._under_way.append((noted, done))
        self._operations += 1
        self._wire_bytes += plan.sent_bytes
        return done

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise DtcommError("group: this process was forked from the one that made the communicator")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
