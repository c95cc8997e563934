"""Collectives inside a host as one kernel, or one a step, over memory that all its GPUs reach, queued on the current
stream.

What has no fused kernel goes over the group's own backend, and the report counts why; with DTCOMM_RUNTIME=peer it is an
error instead. The host waits for nothing: a rank that did not come stands in a word of device memory, which is copied
to the host behind each call and looked at by the next one, or by ``wait``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtcomm.errors import DtcommError, PeerLost
from dtcomm.runtime import flight
from dtcomm.runtime.around import Around
from dtcomm.runtime.flight import KEPT, Flight, Recorder, Sighting
from dtcomm.runtime.fused import FusedPlan, FusedRanks, NoKernel
from dtcomm.runtime.joining import Runtime
from dtcomm.runtime.on_streams import StreamWork
from dtcomm.runtime.shape import Shape
from dtcomm.runtime.shm import Buffers
from dtcomm.runtime.streams import Fence, Streams
from dtcomm.runtime.work import Work
from dtcomm.schedule import Schedule


class Below(NamedTuple):
    """The plan of a call that the group's backend serves, and why."""

    plan: Any
    reason: str


class PeerRuntime:
    """One rank of ``fused``; ``below`` serves what has no fused kernel, unless the kernels are ``forced``.

    ``names[rank]`` is how errors call a rank; ``memory`` says what kind the ranks reach, and ``held`` keeps it.
    """

    name = "peer"

    def __init__(
        self,
        fused: FusedRanks,
        streams: Streams,
        below: Runtime,
        names: Sequence[str],
        memory: str,
        held: Any = None,
        forced: bool = False,
    ) -> None:
        self._fused = fused
        self._streams = streams
        self._below = below
        self._names = list(names)
        self._memory = memory
        self._held = held
        self._forced = forced
        self._fence = Fence(streams)
        self._missing = streams.staging(4).view(torch.int32).zero_()
        self._word = self._missing.numpy()  # the same memory, read as it is
        self._looked: Any = None
        self._operations = 0
        self._wire_bytes = 0
        self._reasons: Counter[str] = Counter()
        self._failure: DtcommError | None = None
        self._recorder = Recorder()
        self._under_way: deque[tuple[Flight, Any]] = deque(maxlen=KEPT)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # calls run in issue order

    def prepare(self, shape: Shape, schedule: Schedule) -> FusedPlan | Below:
        """A plan for calls of this shape. ValueError where only fused kernels are allowed and there is none."""
        try:
            return self._fused.prepare(shape, schedule)
        except NoKernel as reason:
            if self._forced:
                raise ValueError(f"DTCOMM_RUNTIME=peer: {reason}") from None
            return Below(self._below.prepare(shape, schedule), str(reason))

    def run(
        self, plan: FusedPlan | Below, buffers: Sequence[Buffers], seed: int, around: Around | None = None
    ) -> int:
        """Queue on the current stream; returns the bytes sent."""
        with self._lock:
            if isinstance(plan, Below):
                self._require_usable()
                self._reasons[plan.reason] += 1
                return self._below.run(plan.plan, buffers, seed, around)
            self._queue(plan, buffers)
        return plan.sent_bytes

    def submit(
        self,
        plan: FusedPlan | Below,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        around: Around | None = None,
    ) -> Work:
        """Queue beside the current stream, after what that was given so far."""
        streams = self._streams
        with self._lock:
            if isinstance(plan, Below):
                self._require_usable()
                self._reasons[plan.reason] += 1
                return self._below.submit(plan.plan, buffers, outputs, seed, around)
            ready = streams.record()
            with streams.on(streams.side()):
                streams.wait(ready)
                for part in buffers:
                    for tensor in part:
                        if tensor is not None:
                            streams.hold(tensor)
                done = self._queue(plan, buffers)
        return PeerWork(self, streams, streams.side(), done, outputs, plan.sent_bytes)

    def set_timeout(self, seconds: float) -> None:
        """How long kernels of the plans from now on wait for the other ranks."""
        self._fused.set_budget(seconds)
        self._below.set_timeout(seconds)

    def close(self) -> None:
        """Give the memory back, and leave the group."""
        self._held = None
        self._failure = self._failure or DtcommError("group: its communicator has been released")
        self._below.close()

    def check(self) -> None:
        """PeerLost where the kernels are known to have missed a rank. The device is not waited for."""
        missing = int(self._word[0])
        if missing and not isinstance(self._failure, PeerLost):
            self._failure = PeerLost(
                f"{self._names[missing - 1]} did not come to a fused collective within its timeout"
            )
            flight.failed(self._failure)
        self._require_usable()

    def info(self) -> dict[str, Any]:
        """For reports. ``elsewhere`` counts the calls that had no fused kernel, by the reason."""
        below = self._below.info()
        return {
            "runtime": self.name,
            "transport": f"fused kernels over {self._memory} of {self._streams.device}",
            "kernels": "fused",
            "operations": self._operations + below["operations"],
            "wire_bytes": self._wire_bytes + below["wire_bytes"],
            "elsewhere": dict(self._reasons),
            "elsewhere transport": below["transport"],
        }

    @property
    def failure(self) -> str:
        """Why calls raise; empty where they do not."""
        return str(self._failure) if self._failure is not None else self._below.failure

    def flights(self) -> list[Flight]:
        """The last operations of both kinds, oldest first."""
        for noted, event in self._under_way:
            if noted.stage == "started" and self._streams.passed(event):
                noted.stage = "done"
        return sorted([*self._recorder.list(), *self._below.flights()], key=lambda each: each.issued_ns)

    def sightings(self) -> list[Sighting]:
        """Nothing: what kernels see of each other stays on the devices."""
        return []

    def _queue(self, plan: FusedPlan, buffers: Sequence[Buffers]) -> Any:
        self.check()
        noted = self._recorder.issue(plan.text, plan.shape)
        noted.started_ns = time.monotonic_ns()
        noted.stage = "failed"  # unless it comes to something
        self._fence.enter()
        try:
            self._fused.launch(plan, [buffers])
        except BaseException as error:
            self._failure = DtcommError(f"a fused collective could not be started: {error}")
            flight.failed(self._failure)
            raise self._failure from error
        noted.stage = "started"
        done = self._fence.leave()
        self._look(noted, done)
        self._operations += 1
        self._wire_bytes += plan.sent_bytes
        return done

    def _look(self, noted: Flight, done: Any) -> None:
        """Have the word of who is missing copied, one copy at a time; a graph does not look, later calls do."""
        streams = self._streams
        if streams.capturing():
            return
        self._under_way.append((noted, done))
        if self._looked is None or streams.passed(self._looked):
            with streams.on(streams.side()):
                streams.wait(done)
                self._missing.copy_(self._fused.pads[0], non_blocking=True)
                self._looked = streams.record()

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise DtcommError("group: this process was forked from the one that made the communicator")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))


class PeerWork(StreamWork):
    """A fused call on a stream of our own."""

    def __init__(self, runtime: PeerRuntime, *queued: Any) -> None:
        super().__init__(*queued)
        self._runtime = runtime

    def wait(self) -> None:
        """The current stream waits; the host does not. PeerLost where a rank is known to be missing by now."""
        super().wait()
        self._runtime.check()
