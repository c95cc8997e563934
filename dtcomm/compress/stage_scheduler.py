"""Runs compressions that take several collectives, in an order that all ranks share.

Collectives must start in the same order on every rank, and when the second one of a bucket can start depends on when
the first one ends. The order is therefore fixed by the buckets and not by the clock: when bucket i is submitted, its
first stage runs, then the second stage of bucket i - 1, then the third of bucket i - 2, and so on; after the last
bucket the rest runs in the same way. While the factors of one bucket are on the wire, another's are computed.

The DDP hook uses a `StageScheduler` for PowerSGD.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Generator, Sequence

import torch

from dtcomm.streams import Streams, record_streams
from dtcomm.work import QueuedWork, Span, Statistics, Work, completion

#: The stages of one bucket: it yields each collective that it starts, and continues when that is done.
Stages = Generator[Work, None, None]


class _StagedBucket:
    """A bucket whose stages are running; ``work`` is its handle, which is complete when the last stage has run.

    The statistics of ``work`` are the sums over the collectives. Its spans are those of the collectives, and the times
    in which stages computed.
    """

    def __init__(
        self, stages: Stages, outputs: Sequence[torch.Tensor], streams: Streams, *, first: bool, last: bool
    ) -> None:
        self.work = QueuedWork(outputs, streams, interrupt=self.interrupted)
        self.first, self.last = first, last
        self._streams, self._stages = streams, stages
        self._pending: Work | None = None
        self._statistics = Statistics()
        self._spans: list[Span] = []

    def advance(self) -> bool:
        """Wait for the collective in flight and run the next stage; return False after the last one."""
        try:
            if self._pending is not None:
                self._pending.wait()
                self._statistics = Statistics.total((self._statistics, self._pending.statistics()))
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
            self.work.complete(self._streams.record(), self._statistics, self._spans)
        return False

    def interrupted(self, error: BaseException) -> None:
        """Let the collective in flight fail on all ranks."""
        if self._pending is not None:
            self._pending.interrupted(error)

    def fail(self, error: Exception) -> None:
        """End the bucket with an error."""
        self._stages.close()
        self.work.fail(error)


class _Pipeline:
    """The buckets of one backward pass whose stages are not done, the newest first."""

    def __init__(self) -> None:
        self._active: list[_StagedBucket] = []

    def add(self, bucket: _StagedBucket) -> None:
        """Run the first stage of a bucket and the next one of those before it; after the last bucket, all stages."""
        if bucket.first:
            for abandoned in self._active:
                abandoned.fail(
                    RuntimeError("the backward pass that this bucket belongs to was never finished")
                )
            self._active = []
        self._active.insert(0, bucket)
        self._advance_all()
        while bucket.last and self._active:
            self._advance_all()

    def _advance_all(self) -> None:
        self._active = [bucket for bucket in self._active if bucket.advance()]


class StageScheduler:
    """Runs the stages of buckets that are submitted in order, the last one of a backward pass marked as such.

    On the CPU the stages run on a thread of their own, because they compute and wait. On a device, where the host does
    not wait, they are queued at once on a side stream; the collectives of all ranks are then queued in one order with
    everything else that their callers queue. The thread ends with the scheduler.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._uses_thread = streams.device.type == "cpu"
        self._queue: queue.SimpleQueue[_StagedBucket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pipeline = _Pipeline()  # on a device
        self._first = True

    def submit(
        self,
        stages: Stages,
        outputs: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor | None] = (),
        *,
        last: bool,
    ) -> Work:
        """Run the first stage of a bucket, and the stages of earlier buckets that are due.

        ``outputs`` are the tensors of the handle's future, ``used`` others that the stages read and write. ``last``
        says that it is the last bucket of the backward pass.
        """
        bucket = _StagedBucket(stages, outputs, self._streams, first=self._first, last=last)
        work = bucket.work
        self._first = last
        if self._uses_thread:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_run_thread, args=(self._queue,), name="dtcomm-stages", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._queue.put, None)
            self._queue.put(bucket)
            return work
        streams = self._streams
        ready = streams.record()
        with streams.on(streams.side_stream()):
            streams.wait(ready)
            record_streams(*outputs, *used)
            self._pipeline.add(bucket)
        return work

    def restart(self) -> None:
        """Start a new backward pass; the buckets that an unfinished one left behind fail."""
        self._first = True


def _run_thread(buckets: queue.SimpleQueue[_StagedBucket | None]) -> None:
    pipeline = _Pipeline()
    while (bucket := buckets.get()) is not None:
        with completion.running_native():
            pipeline.add(bucket)
            del bucket  # while it waits, the thread must not keep a bucket and with it a process group alive
    with completion.running_native():
        del pipeline  # with the buckets of a backward pass that was never finished
