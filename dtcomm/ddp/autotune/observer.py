"""Attaches the autotuner to a `Reducer`: measures steps with a `StepClock` and applies the tuner's changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, where type checkers find it

from dtcomm.ddp.autotune.measure import BucketTiming
from dtcomm.ddp.autotune.tuner import Tuner
from dtcomm.ddp.reducer import InFlightBucket, Reducer, ReducerObserver
from dtcomm.device.streams import Streams


class BucketMarks(NamedTuple):
    """The timing events of one bucket.

    Attributes:
        ready: Behind its gradients.
        finished: Behind its mean.
        seconds: How long its collectives took, where that is known without events (on the CPU), else None.
        wire_bytes: What this rank sent.
    """

    ready: Any
    finished: Any
    seconds: float | None
    wire_bytes: int


class _StepMarks(NamedTuple):
    number: int
    begin: Any
    end: Any
    buckets: Sequence[BucketMarks]


class StepClock:
    """Measures steps with timing events of a device, which are read once the device has passed them.

    On the CPU an event is a time, and has always passed.
    """

    def __init__(self, streams: Streams) -> None:
        self.mark = streams.mark
        self._streams = streams
        self._steps: deque[_StepMarks] = deque()
        self._begin: Any = None

    def begin_step(self) -> None:
        """The first bucket of a step is ready."""
        self._begin = self.mark()

    def end_step(self, number: int, buckets: Sequence[BucketMarks]) -> None:
        """The current stream waits for all buckets of the step."""
        self._steps.append(_StepMarks(number, self._begin, self.mark(), buckets))

    def report(self, end_step: Callable[[int, float, Sequence[BucketTiming]], None], *, wait: bool) -> None:
        """Call ``end_step`` for each step that the device has finished; with ``wait`` the host waits for all steps."""
        streams = self._streams
        while self._steps:
            step = self._steps[0]
            if not streams.query(step.end):
                if not wait:
                    return
                streams.synchronize(step.end)
            self._steps.popleft()
            timings = [
                BucketTiming(
                    streams.elapsed(step.begin, ready),
                    streams.elapsed(ready, finished) if seconds is None else seconds,
                    wire_bytes,
                )
                for ready, finished, seconds, wire_bytes in step.buckets
            ]
            end_step(step.number, streams.elapsed(step.begin, step.end), timings)


class TunerObserver(ReducerObserver):
    """Gives the autotuner the times of steps and samples of gradients, and applies its choices."""

    def __init__(self, tuner: Tuner, reducer: Reducer) -> None:
        self._tuner = tuner
        self._error_state, self._factors = reducer.error_state, reducer.averager.factors
        self._layouts = reducer.layouts
        self._clock: StepClock | None = None
        self._ready: dict[int, Any] = {}  # marks of this step, by the index of the bucket
        self._finished: dict[int, Any] = {}

    def begin_pass(self, step: int, streams: Streams) -> None:
        """Report the steps that are over, let the tuner choose, and drop the state of parameters that change."""
        if self._clock is None:
            self._clock = StepClock(streams)
            self._tuner.set_device(streams.device)
        self._clock.report(self._tuner.end_step, wait=self._tuner.reads_clock(step))
        self._tuner.begin_step(step)
        for name in self._tuner.pop_changes():
            self._factors.forget(name)
        for name in self._tuner.pop_uncompressed():
            self._error_state.repay_residual(name)
        self._clock.begin_step()

    def bucket_ready(self, step: int, bucket: GradBucket) -> None:
        """Give the tuner a sample of the gradients, if it needs one."""
        if self._tuner.needs_sample(step):
            self._tuner.sample_bucket(bucket.index(), self._layouts.names(bucket), bucket.gradients())

    def bucket_prepared(self, bucket: InFlightBucket) -> None:
        """Record when the bucket is ready."""
        assert self._clock is not None
        self._ready[bucket.index] = self._clock.mark()

    def bucket_finished(self, bucket: InFlightBucket) -> None:
        """Record when the bucket is finished."""
        assert self._clock is not None
        self._finished[bucket.index] = self._clock.mark()

    def end_pass(self, step: int, buckets: list[InFlightBucket]) -> None:
        """End the step on the clock."""
        assert self._clock is not None
        marks = [
            BucketMarks(
                self._ready[bucket.index],
                self._finished[bucket.index],
                bucket.work.seconds if bucket.buffer.is_cpu else None,
                bucket.work.wire_bytes,
            )
            for bucket in buckets
        ]
        self._clock.end_step(step, marks)
