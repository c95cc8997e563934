"""The runtime over a torch.distributed group: it executes the rounds of a plan through a transport.

It serves CUDA tensors over NCCL, where everything is queued on streams and the host waits for nothing, and CPU and CUDA
tensors over Gloo, where the host waits for messages: there calls run on a thread of the runtime, which may have to be
given up, because Gloo does not always notice that a rank has died. All memory of a call on a device comes from torch's
allocator and goes back to it, so that a CUDA graph can capture any call over NCCL.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from dtcomm import env
from dtcomm.errors import CommunicatorClosed, DtcommError
from dtcomm.kernels import dispatch
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.flight_recorder import FlightEntry
from dtcomm.runtime.stream_runtime import StreamRuntime
from dtcomm.runtime.torchdist import faults
from dtcomm.runtime.torchdist.arithmetic import Arithmetic
from dtcomm.runtime.torchdist.faults import MAX_TAG
from dtcomm.runtime.torchdist.rounds import (
    ALL_GATHER,
    ALL_TO_ALL,
    HOST_LOOKAHEAD,
    MESSAGES,
    WHOLE,
    Payload,
    RoundsPlan,
    host_message_bytes,
)
from dtcomm.runtime.torchdist.transport import P2PMessage, Transport
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks, OpSpec
from dtcomm.schedule import Schedule
from dtcomm.streams import HostStreams, Streams, record_buffers
from dtcomm.work import QueuedWork, Statistics, StreamWork, Work
from dtcomm.work.statistics import PhaseTimer, takes_phase_times

Compare = Callable[[str, object], None]

_RELEASED = "group: its communicator has been released"


@dataclass
class QueuedOp:
    """An operation on its way through the runtime of a transport that blocks the host.

    ``inputs_ready`` is the event at which its tensors are ready, on a device; ``work`` is the caller's handle.
    ``ended`` says that the handle has its result or an error.
    """

    entry: FlightEntry
    plan: RoundsPlan
    buffers: Sequence[Buffers]
    seed: int
    hooks: OpHooks
    work: QueuedWork
    inputs_ready: Any
    ended: bool = False


class TorchDistRuntime(StreamRuntime[RoundsPlan]):
    """Executes operations on tensors of ``streams.device`` over ``transport``, which it closes.

    Args:
        message_bytes: Payload bytes of a chunk that a piece takes at least; 0: DTCOMM_PIECE_KIB, or chosen by size.
        compare: Called before each operation with its text and a value whose ``repr`` must be equal on all ranks;
            raises if ranks differ.
    """

    name = "process_group"

    def __init__(
        self,
        transport: Transport,
        streams: Streams,
        rank: int,
        message_bytes: int = 0,
        compare: Compare | None = None,
    ) -> None:
        super().__init__(streams)
        self.rank = rank
        self._transport = transport
        self._message_bytes = message_bytes
        self._compare = compare
        self._closed = False
        self._memory = MemoryPool(streams)
        self._sent_to: list[int] = []  # by rank
        self._running: QueuedOp | None = None
        self._seen: tuple[int, int] | None = None  # the operation's number and its progress at the last look
        self._queue: queue.SimpleQueue[QueuedOp | None] = queue.SimpleQueue()
        self._queue_lock = threading.Lock()  # nothing is queued behind the None that ends the thread
        self._thread: threading.Thread | None = None

    def make_plan(self, spec: OpSpec, schedule: Schedule) -> RoundsPlan:
        """A plan for calls of this operation. ValueError if it needs what the transport does not do."""
        # A codec written in Python gets every chunk in one piece, in every runtime: the results are the same then.
        whole = WHOLE if spec.in_python else 0
        if self._transport.blocks_host:
            least = whole or self._message_bytes or int(env.get("DTCOMM_PIECE_KIB")) * 1024
            least = least or host_message_bytes(spec, schedule)
            return RoundsPlan(spec, schedule, self.rank, least, False, HOST_LOOKAHEAD)
        if spec.checksum:
            raise ValueError(
                "checksum: payloads are not looked at on their way between devices; expected False"
            )
        return RoundsPlan(spec, schedule, self.rank, whole or self._message_bytes)

    def run(
        self, plan: RoundsPlan, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None
    ) -> int:
        """Run on the current stream, or on the runtime's thread; returns the bytes sent."""
        hooks = hooks or NO_HOOKS
        with self._lock:
            if not self._transport.blocks_host:
                self._perform(plan, buffers, seed, hooks)
                return plan.sent_bytes
            work = self._enqueue(plan, buffers, (), seed, hooks)
        work.wait()
        return plan.sent_bytes

    def submit(
        self,
        plan: RoundsPlan,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue on the side stream behind the work of the current stream, or on the runtime's thread."""
        hooks = hooks or NO_HOOKS
        with self._lock:
            if self._transport.blocks_host:
                return self._enqueue(plan, buffers, outputs, seed, hooks)
            event = self._on_side_stream(buffers, hooks, lambda: self._perform(plan, buffers, seed, hooks))
        return StreamWork(self._streams, event, outputs, plan.sent_bytes)

    def set_timeout(self, seconds: float) -> None:
        """Set how long later calls wait for the other ranks; over NCCL the group's own watchdog ends them."""
        self._transport.set_timeout(seconds)

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank raise PeerLost.

        An operation that still waits for other ranks after a second fails with CommunicatorClosed.
        """
        if os.getpid() != self._pid:
            return
        with self._queue_lock:
            self._closed = True
            self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)
            if self._thread.is_alive():  # in a wait that ends at the timeout; the group goes with the process
                if (op := self._running) is not None:
                    self._give_up(op, CommunicatorClosed(_RELEASED))
                return
        faults.forget(self)
        self._transport.close()

    def info(self) -> dict[str, Any]:
        """The transport, the kernels and the counters."""
        device = self._streams.device
        kernels = dispatch.current() if device.type == "cpu" else ", ".join(dispatch.available(device.type))
        return {
            "runtime": self.name,
            "transport": self._transport.describe(device),
            "kernels": kernels,
            "operations": self._operations,
            "wire_bytes": self._wire_bytes,
            "sent_to": self._sent_to,
        }

    def _perform(
        self,
        plan: RoundsPlan,
        buffers: Sequence[Buffers],
        seed: int,
        hooks: OpHooks,
        entry: FlightEntry | None = None,
        timer: PhaseTimer | None = None,
    ) -> Any:
        """Run on the current stream; returns the event behind the operation."""
        self._require_usable()
        entry = entry or self._recorder.issue(plan.text, plan.spec.details())
        self._transport.entry = entry

        def operation() -> None:
            if self._compare is not None:
                self._compare_ranks(plan, hooks.agreed)
            for task in hooks.before:
                task()
            arithmetic = Arithmetic(plan, buffers, seed, timer)
            Execution(plan, arithmetic, self._transport, self._memory, self._operations, hooks.agreed).run()
            for task in hooks.after:
                task()

        event = self._execute(plan, operation, entry)
        self._sent_to = [sum(sent) for sent in zip_longest(self._sent_to, plan.sent_to, fillvalue=0)]
        if self._transport.blocks_host:
            entry.stage = "done"
            entry.finished_ns = time.monotonic_ns()
        return event

    def _compare_ranks(self, plan: RoundsPlan, agreed: int) -> None:
        assert self._compare is not None
        text = f"call {self._operations}: {plan.text}" + (f" with number {agreed}" if agreed else "")
        self._compare(text, (plan.spec, self._operations, agreed))

    def _failure_of(self, error: BaseException) -> DtcommError:
        if not self._transport.blocks_host:
            if isinstance(error, DtcommError):
                return error
            first_line = str(error).splitlines()[0] if str(error) else repr(error)
            return DtcommError(f"{self._transport.name}: a call broke off: {first_line}")
        # The messages of the failed call may still be under way, so the group cannot be used again. An error refers to
        # its frames, and they to the messages, which keep the connections open: the frames are cleared.
        _clear_frames(error)
        self._transport.close()
        if isinstance(error, DtcommError):
            return error
        return DtcommError(f"a call broke off: {error!r}")

    def _require_usable(self) -> None:
        super()._require_usable()
        if self._closed:
            raise CommunicatorClosed(_RELEASED)

    def _enqueue(
        self,
        plan: RoundsPlan,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks,
    ) -> QueuedWork:
        self._require_usable()
        if threading.current_thread() is self._thread:
            raise RuntimeError("a codec written in Python calls a collective of the group that it works for")
        if self._streams.capturing():
            raise DtcommError(
                "group: a graph cannot capture what goes through the host's memory; NCCL groups can"
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="dtcomm-process-group", daemon=True)
            self._thread.start()
        entry = self._recorder.issue(plan.text, plan.spec.details())
        work = QueuedWork(outputs, self._streams, detached=True, interrupt=self.interrupted)
        op = QueuedOp(entry, plan, buffers, seed, hooks, work, self._streams.record())
        with self._streams.on(self._streams.side_stream()):
            record_buffers(self._streams, [*buffers, *hooks.tensors()])
        with self._queue_lock:
            self._require_usable()
            self._queue.put(op)
        return work

    def _serve(self) -> None:
        with self._streams.on(self._streams.side_stream()):
            while (op := self._queue.get()) is not None:
                self._serve_one(op)
                del op

    def _serve_one(self, op: QueuedOp) -> None:
        timer = PhaseTimer() if takes_phase_times() else None
        self._running = op
        faults.watch(self)
        try:
            self._streams.wait(op.inputs_ready)
            event = self._perform(op.plan, op.buffers, op.seed, op.hooks, op.entry, timer)
        except BaseException as error:
            self._running = None
            self._fail(op, error)
            return
        self._running = None
        entry, spans = op.entry, timer.spans() if timer is not None else []
        started, finished = entry.started_ns, entry.finished_ns
        if self._end(op):
            op.work.complete(
                event, Statistics(op.plan.sent_bytes, (finished - started) * 1e-9, started, finished), spans
            )

    def busy(self) -> bool:
        """Whether an operation is running that has not been given up."""
        op = self._running
        return op is not None and not op.ended

    def look(self) -> None:
        """Give up the running operation if it makes no progress and waits for a rank that will not come."""
        op, seen = self._running, self._seen
        self._seen = None if op is None else (op.entry.number, self._transport.progress())
        if op is None or op.ended or self._seen != seen:
            return
        error = self._transport.lost_peer()
        if error is not None and self._running is op:
            self._give_up(op, error)

    def interrupted(self, error: BaseException) -> None:
        """Give up the running operation on all ranks, because a wait of this one was interrupted."""
        op = self._running
        if op is not None and not op.ended:
            self._give_up(op, self._transport.interrupt())

    def _give_up(self, op: QueuedOp, error: DtcommError) -> None:
        """Fail the running operation and those behind it, while the thread waits in the transport."""
        op.entry.finished_ns = time.monotonic_ns()
        self._failure = type(error)(str(error))
        flight_recorder.failed(error)
        # The thread stays in its wait until the timeout, and whatever is queued with it.
        self._fail(op, error)
        with contextlib.suppress(queue.Empty):
            while (waiting := self._queue.get_nowait()) is not None:
                self._fail(waiting, type(error)(str(error)))
            self._queue.put(None)

    def _fail(self, op: QueuedOp, error: BaseException) -> None:
        if op.entry.stage in ("issued", "started"):
            op.entry.stage = "failed"
        if self._end(op):
            op.work.fail(error)

    def _end(self, op: QueuedOp) -> bool:
        """Mark an operation as ended; return whether it was not yet."""
        with self._queue_lock:
            first, op.ended = not op.ended, True
        return first


class MemoryPool:
    """Reuses the memory of pieces on the host, where allocating megabytes costs page faults.

    On a device torch's caching allocator does that, ordered by streams. Only one operation runs at a time.
    """

    def __init__(self, streams: Streams) -> None:
        self._device = streams.device
        self._reuses = isinstance(streams, HostStreams)
        self._free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """At least ``size`` bytes."""
        memory = self._free.pop() if self._free else None
        if memory is not None and memory.numel() >= size:
            return memory
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def give_back(self, memory: torch.Tensor) -> None:
        """Allow ``memory`` to be taken again."""
        if self._reuses:
            self._free.append(memory)


class Execution:
    """One call: it walks through the rounds of all pieces in the plan's order.

    ``number`` counts the communicator's operations, equal on all ranks; ``agreed`` is what the ranks agreed on.
    """

    def __init__(
        self,
        plan: RoundsPlan,
        arithmetic: Arithmetic,
        transport: Transport,
        memory: MemoryPool,
        number: int,
        agreed: int = 0,
    ) -> None:
        self._plan = plan
        self._arithmetic = arithmetic
        self._transport = transport
        self._pool = memory
        self._number = number
        self._first_tag = plan.fingerprint + number * 0x9E3779B1 + agreed
        self._handles: dict[int, Any] = {}  # of the exchange of each piece that is under way

    def run(self) -> None:
        """Run to the end."""
        last = len(self._plan.rounds) - 1
        memory = self._arithmetic.memory
        for piece, at in self._plan.order:
            if at == 0:
                memory[piece] = self._pool.take(self._plan.memory_bytes[piece])
            else:
                self._finish(piece, at - 1)
            self._arithmetic.compute(piece, at, after=False)
            self._start(piece, at)
            if at == last:
                self._finish(piece, at)
                self._pool.give_back(self._arithmetic.release(piece))

    def _start(self, piece: int, at: int) -> None:
        round_, memory = self._plan.rounds[at], self._arithmetic.memory[piece]
        sent, received = self._plan.regions[piece][at]
        if round_.kind == ALL_TO_ALL:
            self._handles[piece] = self._transport.all_to_all(
                memory[received.start : received.stop],
                received.sizes,
                memory[sent.start : sent.stop],
                sent.sizes,
            )
        elif round_.kind == ALL_GATHER:
            if sent.start < sent.stop:
                self._handles[piece] = self._transport.all_gather(
                    memory[received.start : received.stop], memory[sent.start : sent.stop]
                )
        elif round_.kind == MESSAGES:
            sends, receives = self._messages(piece, round_.sends), self._messages(piece, round_.receives)
            if sends or receives:
                context = f"round {at} of piece {piece} of call {self._number}, {self._plan.text}"
                checksum = self._plan.spec.checksum
                self._handles[piece] = self._transport.send_recv(sends, receives, checksum, context)

    def _finish(self, piece: int, at: int) -> None:
        handle = self._handles.pop(piece, None)
        if handle is not None:
            self._transport.wait(handle)
        self._arithmetic.compute(piece, at, after=True)

    def _messages(self, piece: int, payloads: Sequence[Payload]) -> list[P2PMessage]:
        messages = []
        for peer, (owner, payload_id), (chunk, level) in payloads:
            if self._plan.pieces[piece][chunk]:  # both ends of an empty chunk skip it
                payload = self._arithmetic.payload(piece, owner, payload_id, chunk, level)
                # Messages of one tag arrive in the order of their rounds, which is the same on both ranks. Tag 0 is
                # that of headers, and the largest one is never sent.
                tag = 1 + (self._first_tag + payload_id) % (MAX_TAG - 1)
                messages.append(P2PMessage(payload, peer, tag))
        return messages


def _clear_frames(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
