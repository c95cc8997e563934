"""Programs over a group that queues its work on a device (NCCL): encoding, exchange and sums follow each other on
streams, and the host waits for none of them.

A synchronous call is queued on the caller's stream; an asynchronous one on a stream of our own, so that the caller's
goes on beside it, and ``wait`` makes the caller's stream wait. The group's own stream moves the bytes. All memory of a
call comes from torch's allocator and goes back to it, so that a CUDA graph can capture any call.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm.errors import DtcommError
from dtcomm.kernels import dispatch
from dtcomm.runtime import flight
from dtcomm.runtime.arithmetic import Arithmetic
from dtcomm.runtime.around import NOTHING, Around
from dtcomm.runtime.exchange import Exchange, Letter
from dtcomm.runtime.flight import KEPT, Flight, Recorder, Sighting
from dtcomm.runtime.replay import TAGS
from dtcomm.runtime.rounds import ALL_GATHER, ALL_TO_ALL, MESSAGES, Parcel, Rounds
from dtcomm.runtime.shape import Shape
from dtcomm.runtime.shm import Buffers
from dtcomm.runtime.streams import Fence, Streams
from dtcomm.runtime.work import Work
from dtcomm.schedule import Schedule


class StreamRuntime:
    """Calls on tensors of ``streams.device`` over ``exchange``; ``leave`` gives the group back.

    ``compare`` is told what each call is before it begins, and raises where ranks differ.
    """

    name = "process_group"

    def __init__(
        self,
        exchange: Exchange,
        streams: Streams,
        rank: int,
        leave: Callable[[], None],
        piece_bytes: int = 0,
        compare: Callable[[str], None] | None = None,
    ) -> None:
        self.rank = rank
        self._exchange = exchange
        self._streams = streams
        self._fence = Fence(streams)
        self._leave: Callable[[], None] | None = leave
        self._piece_bytes = piece_bytes
        self._compare = compare
        self._operations = 0
        self._wire_bytes = 0
        self._failure: DtcommError | None = None
        self._recorder = Recorder()
        self._under_way: deque[tuple[Flight, Any]] = deque(maxlen=KEPT)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # calls run in issue order

    def prepare(self, shape: Shape, schedule: Schedule) -> Rounds:
        """A plan for calls of this shape. ValueError where it asks for what only the CPU can do."""
        if shape.checksum:
            raise ValueError(
                "checksum: payloads are not looked at on their way between devices; expected False"
            )
        return Rounds(shape, schedule, self.rank, self._piece_bytes)

    def run(self, plan: Rounds, buffers: Sequence[Buffers], seed: int, around: Around | None = None) -> int:
        """Queue on the current stream; returns the bytes sent."""
        with self._lock:
            self._queue(plan, buffers, seed, around or NOTHING)
        return plan.sent_bytes

    def submit(
        self,
        plan: Rounds,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        around: Around | None = None,
    ) -> Work:
        """Queue beside the current stream, after what that was given so far."""
        streams = self._streams
        with self._lock:
            ready = streams.record()
            with streams.on(streams.side()):
                streams.wait(ready)
                for part in buffers:
                    for tensor in part:
                        if tensor is not None:
                            streams.hold(tensor)
                done = self._queue(plan, buffers, seed, around or NOTHING)
        return StreamWork(streams, streams.side(), done, outputs, plan.sent_bytes)

    def set_timeout(self, seconds: float) -> None:
        """Nothing: the group's own watchdog ends calls that others do not come to."""

    def close(self) -> None:
        """Leave the group."""
        leave, self._leave = self._leave, None
        if leave is not None and os.getpid() == self._pid:
            leave()

    def info(self) -> dict[str, Any]:
        """For reports."""
        return {
            "runtime": self.name,
            "transport": f"{self._exchange.name}, queued on streams of {self._streams.device}",
            "kernels": ", ".join(dispatch.available(self._streams.device.type)),
            "operations": self._operations,
            "wire_bytes": self._wire_bytes,
        }

    @property
    def failure(self) -> str:
        """Why calls raise; empty where they do not."""
        return "" if self._failure is None else str(self._failure)

    def flights(self) -> list[Flight]:
        """The last operations, oldest first."""
        for noted, event in self._under_way:
            if noted.stage == "started" and self._streams.passed(event):
                noted.stage = "done"
        return self._recorder.list()

    def sightings(self) -> list[Sighting]:
        """Nothing: the ranks share no memory."""
        return []

    def _queue(self, plan: Rounds, buffers: Sequence[Buffers], seed: int, around: Around) -> Any:
        self._require_usable()
        if around.before or around.after:
            raise DtcommError("codec: sums on common ground are made on the CPU alone")
        noted = self._recorder.issue(plan.text, plan.shape)
        noted.started_ns = time.monotonic_ns()
        noted.stage = "failed"  # unless it comes to something
        self._fence.enter()
        try:
            if self._compare is not None:
                self._compare(f"call {self._operations}: {plan.text}")
            _Call(plan, buffers, seed, self._exchange, self._streams).run()
        except BaseException as error:
            self._failure = error if isinstance(error, DtcommError) else _broken(self._exchange.name, error)
            flight.failed(self._failure)
            raise self._failure from error
        done = self._fence.leave()
        noted.stage = "started"
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
        if self._leave is None:
            raise DtcommError("group: its communicator has been released")


class _Call:
    """One call: pieces in flight, and what each still waits for."""

    def __init__(
        self, plan: Rounds, buffers: Sequence[Buffers], seed: int, exchange: Exchange, streams: Streams
    ) -> None:
        self._plan = plan
        self._exchange = exchange
        nothing = torch.empty(0, dtype=torch.uint8, device=streams.device)
        self._nothing = nothing
        self._memory = [nothing] * len(plan.plan.pieces)
        self._arithmetic = Arithmetic(plan.plan, buffers, self._memory, seed, None, plan.places)
        self._handles: dict[int, Any] = {}

    def run(self) -> None:
        plan = self._plan
        last = len(plan.rounds) - 1
        for number, at in plan.order:
            if at == 0:
                self._memory[number] = self._nothing.new_empty(plan.bytes[number])
            else:
                self._finish(number, at - 1)
            self._do(number, plan.rounds[at].before)
            self._launch(number, at)
            if at == last:
                self._finish(number, at)
                self._memory[number] = self._nothing

    def _finish(self, number: int, at: int) -> None:
        handle = self._handles.pop(number, None)
        if handle is not None:
            self._exchange.wait(handle)
        self._do(number, self._plan.rounds[at].after)

    def _do(self, number: int, instructions: Sequence[tuple[int, Any]]) -> None:
        piece = self._plan.plan.pieces[number]
        for position, instruction in instructions:
            if piece[instruction.chunk]:
                self._arithmetic.do(number, piece, position, instruction)

    def _launch(self, number: int, at: int) -> None:
        each, memory = self._plan.rounds[at], self._memory[number]
        given, taken = self._plan.regions[number][at]
        if each.way == ALL_TO_ALL:
            self._handles[number] = self._exchange.all_to_all(
                memory[taken.start : taken.stop],
                taken.parts,
                memory[given.start : given.stop],
                given.parts,
            )
        elif each.way == ALL_GATHER:
            if given.start < given.stop:
                self._handles[number] = self._exchange.all_gather(
                    memory[taken.start : taken.stop], memory[given.start : given.stop]
                )
        elif each.way == MESSAGES:
            sends, receives = self._letters(number, each.sends), self._letters(number, each.receives)
            if sends or receives:
                self._handles[number] = self._exchange.letters(sends, receives)

    def _letters(self, number: int, parcels: Sequence[Parcel]) -> list[Letter]:
        piece = self._plan.plan.pieces[number]
        letters = []
        for peer, (owner, box), (chunk, level) in parcels:
            if piece[chunk]:  # both ends of an empty chunk skip it
                payload = self._arithmetic.payload(number, owner, box, piece[chunk], level)
                letters.append((payload, peer, 1 + box % (TAGS - 1)))
        return letters


class StreamWork(Work):
    """A call queued on a stream of our own; ``event`` is behind it."""

    seconds = 0.0  # nobody waits for the device to say

    def __init__(
        self, streams: Streams, stream: Any, event: Any, outputs: Sequence[torch.Tensor], wire_bytes: int
    ) -> None:
        super().__init__(outputs)
        self.wire_bytes = wire_bytes
        self._streams = streams
        self._stream = stream
        self._event = event
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self) -> None:
        """The current stream waits; the host does not."""
        self._streams.wait(self._event)

    def is_completed(self) -> bool:
        return self._streams.passed(self._event)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Complete at once: whoever uses its value waits on his stream."""
        if self._future is None:
            self._future = self._streams.future()
            with self._streams.on(self._stream):
                self._streams.wait(self._event)
                self._future.set_result(self._outputs)
        return self._future


def _broken(name: str, error: BaseException) -> DtcommError:
    return DtcommError(f"{name}: a call broke off: {str(error).splitlines()[0] if str(error) else error!r}")
