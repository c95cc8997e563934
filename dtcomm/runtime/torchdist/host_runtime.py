"""Programs over the point-to-point messages of a torch.distributed group: between hosts, and wherever ranks share
no memory.

Messages are matched by tag, as Gloo does it. Tensors stay on the caller's device, where the kernels' verbs run; from a
device and to it, payloads go through the host's memory.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import env
from dtcomm.device.streams import HostStreams, StreamOrder, Streams, record_buffers
from dtcomm.errors import DtcommError
from dtcomm.kernels import dispatch
from dtcomm.runtime import flight_recorder, phase_timer
from dtcomm.runtime.flight_recorder import FlightEntry, PeerSnapshot, Recorder
from dtcomm.runtime.native.chunk_size import message_bytes
from dtcomm.runtime.phase_timer import PhaseTimer
from dtcomm.runtime.torchdist.arithmetic import Arithmetic
from dtcomm.runtime.torchdist.checksum_frames import Sealed, Wire
from dtcomm.runtime.torchdist.consistency_check import compare
from dtcomm.runtime.torchdist.fault_attribution import Blame, cause_of
from dtcomm.runtime.torchdist.host_staging import Staged
from dtcomm.runtime.torchdist.plan import WINDOW, Plan
from dtcomm.runtime.torchdist.replay import Messages, Replay
from dtcomm.runtime.torchdist.work_queue import Item, Outcome, QueuedWork, disjoint
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks, OpSpec
from dtcomm.schedule import Schedule


class ProcessGroupRuntime:
    """Moves bytes over ``group``, which nobody else may use: its messages are told apart by tags alone.

    ``names[rank]`` is how errors call a rank; every wait ends after ``timeout_s`` seconds; ``store`` is where ranks
    leave word of whom they gave up on (None: the group's own); ``wires`` are emulated links, by rank; ``streams`` those
    of the device that the tensors are on.
    """

    name = "process_group"
    overhead = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: Sequence[str],
        timeout_s: float,
        store: Any = None,
        wires: Sequence[Wire | None] = (),
        streams: Streams | None = None,
    ) -> None:
        self.rank = group.rank()
        self.ranks = group.size()
        self._group: dist.ProcessGroup | None = group
        self._names = list(names)
        self._timeout = timedelta(seconds=timeout_s)
        self._blame = Blame(group, self._names, timeout_s, store)
        self._check = env.get("DTCOMM_CHECK") == "1"
        self._slots: list[list[torch.Tensor]] = [[], []]
        self._turn = 0  # which of the slots the call under way has
        self._ahead: list[
            Item | None
        ] = []  # what was taken from the queue, and may have begun, before its turn
        self._operations = 0
        self._wire_bytes = 0
        self._failure: DtcommError | None = None
        self._recorder = Recorder()
        self._current: FlightEntry | None = None  # the operation under way
        self._wires = list(wires) if any(wires) else []
        self._streams = HostStreams() if streams is None else streams
        self._on_device = streams is not None
        self._order = StreamOrder(self._streams)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held while a call runs inline: calls run in issue order
        self._last: Future[Outcome] | None = None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self, spec: OpSpec, schedule: Schedule) -> Plan:
        """A plan for calls of this shape."""
        chosen = int(env.get("DTCOMM_PIECE_KIB")) * 1024
        return Plan(spec, schedule, self.rank, chosen or message_bytes(spec, schedule))

    def run(self, plan: Plan, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Run to the end, inline where nothing is queued; returns the bytes sent."""
        with self._lock:
            if self._last is None or self._last.done():
                self._require_usable()
                return self._perform(self._item(plan, buffers, seed, hooks)).wire_bytes
            item = self._enqueue(plan, buffers, seed, hooks)
        outcome = item.future.result()
        self._streams.wait(item.done)
        return outcome.wire_bytes

    def submit(
        self,
        plan: Plan,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> QueuedWork:
        """Queue behind what runs already."""
        with self._lock:
            return QueuedWork(self._enqueue(plan, buffers, seed, hooks), outputs, self._streams)

    def set_timeout(self, seconds: float) -> None:
        """How long the calls from now on wait for the other ranks."""
        self._timeout = timedelta(seconds=seconds)
        self._blame.set_timeout(seconds)

    def close(self) -> None:
        """Leave the group; peers that still wait for this rank are told by the closed connections."""
        if os.getpid() != self._pid:
            return
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)
            if self._thread.is_alive():  # in a wait that ends at the timeout; the group goes with the process
                return
        self._leave()

    def info(self) -> dict[str, Any]:
        """For reports."""
        return {
            "runtime": self.name,
            "transport": "messages of the group's backend"
            + (f", through the host's memory from and to {self._streams.device}" if self._on_device else ""),
            "kernels": ", ".join(dispatch.available("cuda")) if self._on_device else dispatch.current(),
            "operations": self._operations,
            "wire_bytes": self._wire_bytes,
        }

    @property
    def failure(self) -> str:
        """Why calls raise; empty where they do not."""
        return "" if self._failure is None else str(self._failure)

    def flight_entries(self) -> list[FlightEntry]:
        """The last operations, oldest first."""
        return self._recorder.list()

    def peer_snapshots(self) -> list[PeerSnapshot]:
        """Nothing: the ranks share no memory."""
        return []

    def _enqueue(self, plan: Plan, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None) -> Item:
        self._require_usable()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="dtcomm-process-group", daemon=True)
            self._thread.start()
        item = self._item(plan, buffers, seed, hooks)
        if self._on_device:
            self._lend(item)
        self._last = item.future
        self._queue.put(item)
        return item

    def _lend(self, item: Item) -> None:
        # Our own stream uses the caller's tensors, once they are ready.
        item.ready = self._streams.record()
        with self._streams.on(self._streams.side_stream()):
            record_buffers(self._streams, [*item.buffers, *item.hooks.tensors()])

    def _item(self, plan: Plan, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None) -> Item:
        return Item(
            self._recorder.issue(plan.text, plan.spec.details()), plan, buffers, seed, hooks or NO_HOOKS
        )

    def _serve(self) -> None:
        with self._streams.on(self._streams.side_stream()):
            self._serve_queue()

    def _serve_queue(self) -> None:
        while (item := self._take()) is not None:
            try:
                if item.replay is None and item.ready is not None:
                    self._streams.wait(item.ready)
                outcome = self._perform(item, functools.partial(self._begin_next, item))
            except BaseException as error:
                item.future.set_exception(error)
            else:
                item.future.set_result(outcome)
            del item

    def _take(self) -> Item | None:
        return self._ahead.pop() if self._ahead else self._queue.get()

    def _begin_next(self, item: Item) -> None:
        """While the last messages of ``item`` are on their way, encode and send the first of what is queued behind
        it, unless the two touch the same memory.
        """
        if self._ahead or self._check:
            return
        try:
            following = self._queue.get_nowait()
        except queue.Empty:
            return
        self._ahead.append(following)
        if following is None or not disjoint(item, following):
            return
        following.noted.started_ns = time.monotonic_ns()
        following.noted.stage = "started"
        if following.ready is not None:
            self._streams.wait(following.ready)
        following.replay = self._replay(following, 1 - self._turn, self._operations + 1)
        following.replay.begin()

    def _replay(self, item: Item, turn: int, number: int) -> Replay:
        if item.plan.pieces:
            self._reserve(turn, item.plan, item.buffers[0].device)
        item.watch = PhaseTimer() if phase_timer.enabled() else None
        arithmetic = Arithmetic(item.plan, item.buffers, self._slots[turn], item.seed, item.watch)
        return Replay(item.plan, arithmetic, self._messages(item.plan), number, item.hooks.agreed)

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise DtcommError("group: this process was forked from the one that made the communicator")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        if self._group is None:
            raise DtcommError("group: its communicator has been released")

    def _perform(self, item: Item, launched: Callable[[], None] = lambda: None) -> Outcome:
        noted = item.noted
        noted.stage = "failed"  # unless it comes to something
        replay, item.replay = item.replay, None
        self._require_usable()
        if self._streams.capturing():
            noted.stage = "issued"
            raise DtcommError(
                "group: a graph cannot capture what goes through the host's memory; NCCL groups can"
            )
        start = time.perf_counter()
        noted.started_ns = noted.started_ns or time.monotonic_ns()
        noted.stage = "started"
        self._current = noted
        self._order.before_op()
        try:
            if replay is not None:
                self._turn = 1 - self._turn
            else:
                if self._check:
                    self._compare(item.plan, item.hooks.agreed)
                for step in item.hooks.before:
                    step()
                replay = self._replay(item, self._turn, self._operations)
            sent = replay.run(launched)
            for step in item.hooks.after:
                step()
            item.done = self._order.after_op()
        except BaseException as error:
            if isinstance(error, DtcommError):
                self._failure = type(error)(str(error))
            else:
                self._failure = DtcommError(f"a call broke off: {error!r}")
            noted.stage = "failed"
            noted.finished_ns = time.monotonic_ns()
            _let_go(error)
            self._leave()
            flight_recorder.failed(error)
            raise
        noted.stage = "done"
        noted.finished_ns = time.monotonic_ns()
        self._operations += 1
        self._wire_bytes += sent
        return Outcome(
            sent,
            time.perf_counter() - start,
            noted.started_ns,
            noted.finished_ns,
            item.watch.spans() if item.watch is not None else (),
        )

    def _messages(self, plan: Plan) -> Messages:
        messages: Messages = self
        if plan.spec.checksum or self._wires:
            messages = Sealed(self, self._names, self.rank, plan.spec.checksum, self._wires)
        return Staged(messages, self._streams) if self._on_device else messages

    def _reserve(self, turn: int, plan: Plan, device: torch.device) -> None:
        # One set of slots serves all plans, since calls do not overlap; a call that begins ahead takes the other one.
        slots = self._slots[turn]
        if not slots or slots[0].numel() < plan.slot_bytes or slots[0].device != device:
            for slot in slots:
                self._streams.record_stream(slot)
            slots.clear()
            slots += [torch.empty(plan.slot_bytes, dtype=torch.uint8, device=device) for _ in range(WINDOW)]

    def send(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to send (``Messages``)."""
        return self._start("send", payload, peer, tag)

    def receive(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to receive (``Messages``)."""
        return self._start("recv", payload, peer, tag)

    def _start(self, verb: str, payload: torch.Tensor, peer: int, tag: int) -> Any:
        try:
            return getattr(self._group, verb)([payload], peer, tag)
        except RuntimeError as error:  # the connection is known to be broken
            raise self._blame.error(peer, error, f"before {verb}") from error

    def wait(self, handle: Any, peer: int, doing: str) -> None:
        """Until a message has left or arrived (``Messages``)."""
        noted = self._current
        if noted is not None and noted.waiting_for != peer:
            noted.waiting_for = peer
            if peer not in noted.waited_for:
                noted.waited_for.append(peer)
        try:
            handle.wait(self._timeout)
        except RuntimeError as error:
            raise self._blame.error(peer, cause_of(self._group, peer, error), doing) from error

    def _compare(self, plan: Plan, agreed: int) -> None:
        text = f"call {self._operations}: {plan.text}" + (f" with number {agreed}" if agreed else "")
        compare(self, self.rank, self._names, text, (plan.spec, self._operations, agreed))

    def _leave(self) -> None:
        # Dropping the group closes its connections, which wakes whoever waits for this rank.
        group, self._group = self._group, None
        if group is not None and group in c10d._world.pg_map:
            dist.destroy_process_group(group)


def _let_go(error: BaseException | None) -> None:
    # Whoever keeps the error keeps its frames, and with their messages under way the connections stay open.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
