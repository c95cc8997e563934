"""Operations with codecs written in Python, which the native engine cannot call.

A thread of the runtime executes their rounds as `torchdist` does: it encodes, sums and decodes in torch, and in each
round the engine moves the payloads, by one all_to_all of bytes. Native operations that are issued while the thread is
busy queue behind it, so that all operations of a communicator run in issue order.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple, Protocol

import torch

from dtcomm.codecs import codec as parse
from dtcomm.errors import CommunicatorClosed, DtcommError
from dtcomm.runtime.torchdist.arithmetic import Arithmetic
from dtcomm.runtime.torchdist.rounds import WHOLE, Payload, RoundsPlan, payload_bytes
from dtcomm.runtime.torchdist.runtime import Execution, MemoryPool
from dtcomm.runtime.torchdist.transport import Transport
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks, OpSpec, TensorSpec
from dtcomm.schedule import Schedule, Transfer
from dtcomm.streams import HostStreams
from dtcomm.work import DeferredWork, QueuedWork, Statistics, Work, completion
from dtcomm.work.statistics import PhaseTimer, takes_phase_times


class ByteMover(Protocol):
    """A plan of the engine for one all_to_all of bytes."""

    @property
    def table_bytes(self) -> int:
        """The memory that the plan takes."""

    def run_now(self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Run to the end; returns the bytes sent."""


class Engine(Protocol):
    """The runtime of the native engine, as far as this module uses it."""

    def prepare_native(self, spec: OpSpec, schedule: Schedule) -> ByteMover:
        """A plan of the engine."""

    def abort(self, error: DtcommError) -> None:
        """Leave the group because of an error of this rank."""

    @property
    def failure(self) -> str:
        """The error that every later call raises; empty if there is none."""


class OrderedThread:
    """A thread that runs functions in the order in which they were put. It starts with the first one.

    ``interrupt`` is a method to call when a wait for the thread is interrupted.
    """

    def __init__(self, name: str, interrupt: Callable[[BaseException], None]) -> None:
        self.calls = 0
        self._interrupt = weakref.WeakMethod(interrupt)
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def busy(self) -> bool:
        """Whether functions run or wait."""
        return self._unfinished > 0

    def description(self) -> str:
        """What `dtcomm.info` says of operations with codecs written in Python."""
        return f"{self.calls} calls: torch encodes and sums on a thread, the engine moves the payloads"

    def put(self, function: Callable[[], None]) -> None:
        """Run a function, which must not raise, after those that were put before. CommunicatorClosed after `stop`."""
        if threading.current_thread() is self._thread:  # it would wait for itself
            raise RuntimeError("a codec written in Python calls a collective of the group that it works for")
        with self._lock:
            if self._stopped:
                raise CommunicatorClosed("group: its communicator has been released")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._unfinished += 1
            self._queue.put(function)

    def drain(self) -> None:
        """Wait until what has been put so far has run."""
        completion.about_to_block()
        done = threading.Event()
        self.put(done.set)
        completion.wait_for(done.wait, interrupted=self.interrupted)

    def interrupted(self, error: BaseException) -> None:
        """A wait for the thread was interrupted: leave the group, since the thread runs its operations in order."""
        method = self._interrupt()
        if method is not None:
            method(error)

    def start_behind(self, outputs: Sequence[torch.Tensor], start: Callable[[], Work]) -> Work:
        """Start an operation when what has been put so far has run; returns its handle."""
        work = DeferredWork(outputs, torch.futures.Future(), self.interrupted)

        def begin() -> None:
            work.begin(start)
            work.connect_future()

        self.put(begin)
        return work

    def stop(self) -> None:
        """End the thread once it has run what has been put."""
        with self._lock:
            self._stopped = True
            self._queue.put(None)

    def _serve(self) -> None:
        while (function := self._queue.get()) is not None:
            with completion.running_native():
                function()
                del function
            with self._lock:
                self._unfinished -= 1


class Exchange(NamedTuple):
    """One round's all_to_all of bytes; the payloads are those that this rank sends and receives, in rank order."""

    mover: ByteMover
    sends: tuple[Payload, ...]
    receives: tuple[Payload, ...]
    sent_bytes: int
    received_bytes: int


class PythonCodecOperation:
    """A plan of an operation with a codec written in Python: `Plan` of the native runtime."""

    def __init__(
        self, engine: Engine, thread: OrderedThread, spec: OpSpec, schedule: Schedule, rank: int
    ) -> None:
        self._engine = engine
        self._thread = thread
        # Every chunk in one piece, as in the other runtimes.
        plans = [RoundsPlan(spec, schedule, each, WHOLE, collectives=False) for each in range(schedule.ranks)]
        self._plan = plans[rank]
        self._exchanges = {
            (piece, at): exchange
            for piece, at in self._plan.order
            if (exchange := _exchange(engine, plans, rank, piece, at)) is not None
        }

    @property
    def table_bytes(self) -> int:
        """The memory that the plan takes."""
        movers = sum(exchange.mover.table_bytes for exchange in self._exchanges.values())
        return self._plan.table_bytes + movers

    def run(self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Run to the end; returns the bytes sent."""
        self.submit(buffers, (), seed, hooks).wait()
        return self._plan.sent_bytes

    def submit(
        self,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue the operation behind earlier ones."""
        work = QueuedWork(outputs, HostStreams(), detached=True, interrupt=self._thread.interrupted)
        self._thread.put(lambda: self._perform(work, buffers, seed, hooks or NO_HOOKS))
        return work

    def _perform(self, work: QueuedWork, buffers: Sequence[Buffers], seed: int, hooks: OpHooks) -> None:
        timer = PhaseTimer() if takes_phase_times() else None
        begin = time.monotonic_ns()
        try:
            if self._engine.failure:
                raise DtcommError(self._engine.failure)
            for task in hooks.before:
                task()
            with torch.inference_mode():  # outputs may be inference tensors
                arithmetic = Arithmetic(self._plan, buffers, seed, timer)
                EngineExecution(self._plan, arithmetic, self._exchanges, hooks.agreed).run()
            for task in hooks.after:
                task()
        except BaseException as error:
            failure = error
            if not isinstance(error, DtcommError):
                failure = DtcommError(f"{self._plan.text} broke off: {error!r}")
                failure.__cause__ = error
                self._engine.abort(failure)  # the peers wait for a payload that will not come
            work.fail(failure)
            return
        end = time.monotonic_ns()
        self._thread.calls += 1
        statistics = Statistics(self._plan.sent_bytes, (end - begin) * 1e-9, begin, end)
        work.complete(None, statistics, timer.spans() if timer is not None else [])


class EngineExecution(Execution):
    """One call, whose rounds are exchanged by the engine; ``agreed`` is what the ranks compare with the first one."""

    def __init__(
        self,
        plan: RoundsPlan,
        arithmetic: Arithmetic,
        exchanges: dict[tuple[int, int], Exchange],
        agreed: int,
    ) -> None:
        super().__init__(plan, arithmetic, Transport(), MemoryPool(HostStreams()), 0)
        self._exchanges = exchanges
        self._agreed = agreed

    def _start(self, piece: int, at: int) -> None:
        exchange = self._exchanges.get((piece, at))
        if exchange is None:
            return
        sent = torch.empty(exchange.sent_bytes, dtype=torch.uint8)
        if exchange.sends:
            torch.cat(self._payloads(piece, exchange.sends), out=sent)
        received = torch.empty(exchange.received_bytes, dtype=torch.uint8)
        hooks, self._agreed = OpHooks(agreed=self._agreed) if self._agreed else None, 0
        exchange.mover.run_now([Buffers(sent, received)], 0, hooks)
        offset = 0
        for payload in self._payloads(piece, exchange.receives):
            payload.copy_(received[offset : offset + payload.numel()])
            offset += payload.numel()

    def _payloads(self, piece: int, payloads: Sequence[Payload]) -> list[torch.Tensor]:
        return [
            self._arithmetic.payload(piece, owner, payload_id, chunk, level)
            for _, (owner, payload_id), (chunk, level) in payloads
        ]


def _exchange(engine: Engine, plans: Sequence[RoundsPlan], rank: int, piece: int, at: int) -> Exchange | None:
    """The exchange of a round of a piece; None if no rank sends anything, which all ranks know alike."""
    ranks, own = len(plans), plans[rank]

    def nonempty(payloads: Sequence[Payload]) -> tuple[Payload, ...]:
        return tuple(payload for payload in payloads if own.pieces[piece][payload.chunk[0]])

    sizes = [0] * ranks**2
    for src, plan in enumerate(plans):
        for payload in plan.rounds[at].sends:
            chunk, level = payload.chunk
            sizes[src * ranks + payload.peer] += payload_bytes(plan.pieces[piece][chunk], level)
    if not any(sizes):
        return None
    spec = OpSpec(
        "all_to_all",
        "sum",
        (TensorSpec(max(sizes), torch.uint8, parse("none")),),
        "one_shot",
        splits=tuple(sizes),
        checksum=own.spec.checksum,
        purpose=f"round {at} of {own.text}",
    )
    round_ = own.rounds[at]
    return Exchange(
        engine.prepare_native(spec, _all_to_all(ranks)),
        nonempty(round_.sends),
        nonempty(round_.receives),
        sum(sizes[rank * ranks : (rank + 1) * ranks]),
        sum(sizes[rank::ranks]),
    )


def _all_to_all(ranks: int) -> Schedule:
    pairs = permutations(range(ranks), 2)
    transfers = tuple(Transfer(0, src, dst, src * ranks + dst, "copy") for src, dst in pairs)
    return Schedule(collective="all_to_all", ranks=ranks, chunks=ranks**2, transfers=transfers)
