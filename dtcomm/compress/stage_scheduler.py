"""Compressions that take several collectives: their stages on one thread, in an order that all ranks share.

A collective must start in the same order on every rank, and the second one of a bucket starts when the first is
done, which is a matter of luck. So that order is fixed by the buckets and not by the clock: when bucket i comes,
its own first stage runs, then the second stage of bucket i - 1, then the third of i - 2, and so on; after the last
bucket the rest in the same way. While one bucket's factors are on the wire, another's are computed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

import torch

from dtcomm.collectives import Span, Work
from dtcomm.device.streams import Streams, record_streams

#: Stages of one bucket: each yields the collective that it started, and goes on when that is done.
Stages = Generator[Work, None, None]


class Sequenced(Work):
    """A bucket under way; done when its last stage is."""

    def __init__(
        self, stages: Stages, outputs: Sequence[torch.Tensor], streams: Streams | None = None
    ) -> None:
        super().__init__(outputs)
        self._streams = streams
        self._event: Any = None
        self._stages = stages
        self._pending: Work | None = None
        self._over = threading.Event()
        self._error: Exception | None = None
        self._future = torch.futures.Future() if streams is None else streams.future()
        self.wire_bytes = 0
        self.seconds = 0.0
        self._spans: list[Span] = []

    def advance(self) -> bool:
        """Wait for the collective under way and run the next stage; False once that was the last."""
        try:
            if self._pending is not None:
                self._pending.wait()
                self.wire_bytes += self._pending.wire_bytes
                self.seconds += self._pending.seconds
                self.started_ns = self.started_ns or self._pending.started_ns
                self.finished_ns = self._pending.finished_ns
                self._spans += self._pending.spans()
            begin = time.monotonic_ns()
            self._pending = next(self._stages, None)
            end = time.monotonic_ns()
            self._spans.append(Span("factors", begin, end, end - begin))
            if self._pending is not None:
                return True
        except Exception as error:
            self.fail(error)
        else:
            self._event = None if self._streams is None else self._streams.record()
            self._over.set()
            self._future.set_result(self._outputs)
        return False

    def fail(self, error: Exception) -> None:
        """End it with this error."""
        self._stages.close()
        self._error = error
        self._over.set()
        self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error
        if self._streams is not None:
            self._streams.wait(self._event)

    def is_completed(self) -> bool:
        return self._over.is_set()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def spans(self) -> list[Span]:
        """The collectives', and what the stages compute."""
        return self._spans


class Sequencer:
    """The thread. Buckets of one backward pass are submitted in order, the last one marked."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Sequenced, bool, bool] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._first = True

    def submit(self, stages: Stages, outputs: Sequence[torch.Tensor], *, last: bool) -> Sequenced:
        """Queue a bucket; its first stage runs as soon as the thread is free."""
        work = Sequenced(stages, outputs)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_run, args=(self._queue,), name="dtcomm-sequencer", daemon=True
            )
            self._thread.start()
        self._queue.put((work, self._first, last))
        self._first = last
        return work

    def restart(self) -> None:
        """A new backward pass begins: what an unfinished one left behind is given up."""
        self._first = True

    def close(self) -> None:
        """End the thread, when what is queued is done."""
        if self._thread is not None:
            self._queue.put(None)


class QueuedSequencer:
    """The same order on a device, where nobody waits for what is queued: on a stream beside the caller's, at once.

    So the collectives of all ranks are queued in one order with whatever else their callers queue.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._active: list[Sequenced] = []
        self._first = True

    def submit(
        self,
        stages: Stages,
        outputs: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor | None],
        *,
        last: bool,
    ) -> Sequenced:
        """Queue a bucket's first stage, and what is due of those before it; ``used`` is what stages read and write."""
        streams = self._streams
        work = Sequenced(stages, outputs, streams)
        ready = streams.record()
        if self._first:
            _give_up(self._active)
            self._active = []
        with streams.on(streams.side_stream()):
            streams.wait(ready)
            record_streams(*outputs, *used)
            self._active = _tick([work, *self._active])
            while last and self._active:
                self._active = _tick(self._active)
        self._first = last
        return work

    def restart(self) -> None:
        """As `Sequencer` does."""
        self._first = True


def _run(jobs: queue.SimpleQueue[tuple[Sequenced, bool, bool] | None]) -> None:
    active: list[Sequenced] = []
    while (job := jobs.get()) is not None:
        work, first, last = job
        if first:
            _give_up(active)
            active = []
        active = _tick([work, *active])
        while last and active:
            active = _tick(active)
        del job, work


def _give_up(left: list[Sequenced]) -> None:
    for each in left:
        each.fail(RuntimeError("the backward pass that this bucket belongs to was never finished"))


def _tick(newest_first: list[Sequenced]) -> list[Sequenced]:
    return [work for work in newest_first if work.advance()]
