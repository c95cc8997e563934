"""Calls that wait for their turn on a thread of the process-group runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dtcomm.device.streams import Streams
from dtcomm.runtime.flight_recorder import FlightEntry
from dtcomm.runtime.phase_timer import PhaseTimer, Span
from dtcomm.runtime.torchdist.plan import Plan
from dtcomm.runtime.torchdist.replay import Replay
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks
from dtcomm.runtime.work import Work


class Outcome(NamedTuple):
    """What a finished call cost."""

    wire_bytes: int
    seconds: float
    started_ns: int = 0
    finished_ns: int = 0
    spans: Sequence[Span] = ()


@dataclass
class Item:
    """One call; ``replay`` is there where it has begun ahead of its turn, ``watch`` where its times are taken.

    On a device, ``ready`` is the event that its tensors are ready at, ``done`` the one behind it.
    """

    noted: FlightEntry
    plan: Plan
    buffers: Sequence[Buffers]
    seed: int
    hooks: OpHooks = NO_HOOKS
    future: Future[Outcome] = field(default_factory=Future)
    replay: Replay | None = None
    watch: PhaseTimer | None = None
    ready: Any = None
    done: Any = None


def disjoint(one: Item, other: Item) -> bool:
    """Whether two calls, in this order, touch no byte in common; steps between them touch what they like."""
    if one.hooks.after or other.hooks.before:
        return False
    events = sorted([(*span, 0) for span in _spans(one)] + [(*span, 1) for span in _spans(other)])
    ends = [0, 0]  # of everything so far, by call
    for begin, end, whose in events:
        if ends[1 - whose] > begin:
            return False
        ends[whose] = max(ends[whose], end)
    return True


def _spans(item: Item) -> Iterator[tuple[int, int]]:
    for part in item.buffers:
        for tensor in part:
            if tensor is not None and tensor.numel():
                yield tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


class QueuedWork(Work):
    """A call that the runtime's thread makes."""

    def __init__(self, item: Item, outputs: Sequence[torch.Tensor], streams: Streams) -> None:
        super().__init__(outputs)
        self._item = item
        self._done = item.future
        self._streams = streams
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self) -> None:
        self._done.result()
        self._streams.wait(self._item.done)

    def is_completed(self) -> bool:
        return self._done.done()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if self._future is None:
            self._future = self._streams.future()
            self._done.add_done_callback(self._complete)
        return self._future

    def _complete(self, done: Future[Outcome]) -> None:
        assert self._future is not None
        failure = done.exception()
        if isinstance(failure, Exception):
            self._future.set_exception(failure)  # type: ignore[arg-type]
        else:
            with self._streams.on(self._streams.side_stream()):
                self._streams.wait(self._item.done)
                self._future.set_result(self._outputs)

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        return self._done.result().wire_bytes

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._done.result().seconds

    @property
    def started_ns(self) -> int:  # type: ignore[override]
        return self._done.result().started_ns

    @property
    def finished_ns(self) -> int:  # type: ignore[override]
        return self._done.result().finished_ns

    def spans(self) -> list[Span]:
        return list(self._done.result().spans)
