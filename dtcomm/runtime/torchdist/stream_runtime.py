"""Programs over a group that queues its work on a device (NCCL): encoding, exchange and sums follow each other on
streams, and the host waits for none of them.

A synchronous call is queued on the caller's stream; an asynchronous one on a stream of our own, so that the caller's
goes on beside it, and ``wait`` makes the caller's stream wait. The group's own stream moves the bytes. All memory of a
call comes from torch's allocator and goes back to it, so that a CUDA graph can capture any call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm.device.streams import Streams
from dtcomm.errors import DtcommError
from dtcomm.kernels import dispatch
from dtcomm.runtime.torchdist.arithmetic import Arithmetic
from dtcomm.runtime.torchdist.replay import TAGS
from dtcomm.runtime.torchdist.rounds import ALL_GATHER, ALL_TO_ALL, MESSAGES, Parcel, Rounds
from dtcomm.runtime.torchdist.stream_runtime_base import Streamed
from dtcomm.runtime.torchdist.transport import Exchange, Letter
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks, OpSpec
from dtcomm.runtime.work import StreamWork, Work
from dtcomm.schedule import Schedule


class StreamRuntime(Streamed):
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
        super().__init__(streams)
        self.rank = rank
        self._exchange = exchange
        self._leave: Callable[[], None] | None = leave
        self._piece_bytes = piece_bytes
        self._compare = compare

    def prepare(self, spec: OpSpec, schedule: Schedule) -> Rounds:
        """A plan for calls of this shape. ValueError where it asks for what only the CPU can do."""
        if spec.checksum:
            raise ValueError(
                "checksum: payloads are not looked at on their way between devices; expected False"
            )
        return Rounds(spec, schedule, self.rank, self._piece_bytes)

    def run(self, plan: Rounds, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Queue on the current stream; returns the bytes sent."""
        with self._lock:
            self._queue(plan, buffers, seed, hooks or NO_HOOKS)
        return plan.sent_bytes

    def submit(
        self,
        plan: Rounds,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue beside the current stream, after what that was given so far."""
        with self._lock:
            done = self._beside(
                buffers, hooks or NO_HOOKS, lambda: self._queue(plan, buffers, seed, hooks or NO_HOOKS)
            )
        return StreamWork(self._streams, done, outputs, plan.sent_bytes)

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

    def _queue(self, plan: Rounds, buffers: Sequence[Buffers], seed: int, hooks: OpHooks) -> Any:
        self._require_usable()

        def begin() -> None:
            if self._compare is not None:
                self._compare(f"call {self._operations}: {plan.text}")
            for step in hooks.before:
                step()
            _Call(plan, buffers, seed, self._exchange, self._streams).run()
            for step in hooks.after:
                step()

        return self._enter(plan, begin, self._broken)

    def _broken(self, error: BaseException) -> DtcommError:
        if isinstance(error, DtcommError):
            return error
        said = str(error).splitlines()[0] if str(error) else repr(error)
        return DtcommError(f"{self._exchange.name}: a call broke off: {said}")

    def _require_usable(self) -> None:
        super()._require_usable()
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
