"""What is attached to a `Reducer`: the guard, the timeline and the recorder of step times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from dtcomm.collectives import Work
from dtcomm.compress.guard_monitor import Monitor
from dtcomm.compress.step_recorder import BucketRecord, StepRecorder
from dtcomm.ddp.reducer import InFlightBucket, Reducer, ReducerObserver
from dtcomm.device.streams import AsyncHostCopy, Streams
from dtcomm.profiling import MessageRecord, Timeline


@dataclass
class _PendingStats:
    """Statistics that are averaged with a bucket; ``on_host`` is their copy once the bucket was counted."""

    work: Work
    mean: torch.Tensor
    on_host: AsyncHostCopy | None = None


class GuardObserver(ReducerObserver):
    """Gives a guard's monitor what it measures, and applies its decisions to the reducer's state."""

    def __init__(self, monitor: Monitor, reducer: Reducer) -> None:
        self._monitor = monitor
        self._error_state, self._factors = reducer.error_state, reducer.averager.factors
        self._unread: deque[_PendingStats] = deque()

    def begin_pass(self, step: int, streams: Streams) -> None:
        """Evaluate the statistics that all ranks averaged in the last step.

        On a device those of the step before: they have been copied to the host by now, which then does not wait.
        """
        delay = 0 if streams.device.type == "cpu" else 1
        while len(self._unread) > delay:
            stats = self._unread.popleft()
            stats.work.wait()
            self._monitor.evaluate(step, (stats.on_host or AsyncHostCopy(stats.mean)).get())
        self._monitor.begin_step(step)
        for name in self._monitor.pop_resets():
            self._error_state.reset(name)
        for name in self._monitor.pop_changes():
            self._factors.forget(name)

    def bucket_prepared(self, bucket: InFlightBucket) -> None:
        """Announce the samples of a bucket."""
        for sample in bucket.samples:
            self._monitor.register_sample(sample.name, sample.scheme)

    def bucket_started(self, bucket: InFlightBucket) -> None:
        """Keep the statistics that travel with a bucket."""
        if bucket.stats is not None:
            self._unread.append(_PendingStats(bucket.work, bucket.stats))

    def bucket_counted(self, bucket: InFlightBucket) -> None:
        """Record what was lost, and start to copy the statistics to the host."""
        if bucket.samples:
            for pending, sample in zip(bucket.pending, bucket.samples, strict=True):
                if pending.residual is not None:
                    self._monitor.record_error(sample, pending.residual)
        self._monitor.check_finite(bucket.buffer)
        for stats in self._unread:
            if stats.mean is bucket.stats:
                stats.on_host = AsyncHostCopy(stats.mean)


class TimelineObserver(ReducerObserver):
    """Records passes in a timeline, while that is switched on."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def begin_backward(self) -> None:
        """Begin the backward interval."""
        if self._timeline.on:
            self._timeline.begin_backward()

    def end_compute(self) -> None:
        """End the backward interval."""
        if self._timeline.on:
            self._timeline.end_backward()

    def end_pass(self, step: int, buckets: list[InFlightBucket]) -> None:
        """Close the step."""
        if self._timeline.on:
            self._timeline.close_step([_message(bucket) for bucket in buckets], at_end=True)


class RecorderObserver(ReducerObserver):
    """Gives the times of buckets to a `StepRecorder`, until it has enough."""

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = None

    def end_pass(self, step: int, buckets: list[InFlightBucket]) -> None:
        """Record the step."""
        if self.recorder is not None and self.recorder.add_step(
            [
                BucketRecord(bucket.plain_bytes, bucket.ready_s, bucket.work.seconds or 0.0)
                for bucket in buckets
            ]
        ):
            self.recorder = None


def _message(bucket: InFlightBucket) -> MessageRecord:
    return MessageRecord(
        label=f"bucket {bucket.index}",
        codec=bucket.layout.spec,
        plain_bytes=bucket.plain_bytes,
        wire_bytes=bucket.work.wire_bytes,
        ready=bucket.ready_ns,
        launched=bucket.launched_ns,
        started=bucket.work.started_ns,
        finished=bucket.work.finished_ns,
        done=bucket.finished_ns,
        spans=bucket.work.spans(),
    )
