"""What is attached to a `Reducer`: the guard, "auto", the timeline, and the check that all ranks have registered the
hook.

`dtcomm.ddp.DDPState` makes them; the reducer calls them in order.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtcomm import torch_compat
from dtcomm.collectives import Work
from dtcomm.collectives.groups import Announcement, nvlink_connects
from dtcomm.compress.monitor import Monitor
from dtcomm.compress.report import describe_uncompressed
from dtcomm.compress.traffic import ParameterTotals, group_rows
from dtcomm.ddp.auto import Tuner, Verifier
from dtcomm.ddp.reducer import InFlightBucket, Reducer, ReducerObserver
from dtcomm.profiling import MessageRecord, Timeline
from dtcomm.streams import HOST_CALL_US, HOST_KERNEL_US, AsyncHostCopy, Streams

_log = logging.getLogger("dtcomm")


@dataclass
class _PendingStats:
    """Statistics that are averaged with a bucket; ``on_host`` is their copy once the average is complete."""

    work: Work
    mean: torch.Tensor
    on_host: AsyncHostCopy | None = None
    agreed: bool = False  # averaged over the agreeing groups too


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
        if self._monitor.agreeing_groups:
            self._agree()
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

    def _agree(self) -> None:
        """Average the statistics over the agreeing groups, at the same point of the program on all of their ranks."""
        for stats in self._unread:
            if not stats.agreed:
                stats.work.wait()
                self._monitor.average_over_agreeing_groups(stats.mean)
                stats.on_host, stats.agreed = AsyncHostCopy(stats.mean), True

    def bucket_prepared(self, bucket: InFlightBucket) -> None:
        """Announce the samples of a bucket."""
        if bucket.norms is not None:
            for pending in bucket.pending:
                self._monitor.register_sample(pending.segment.name, pending.segment.codec)

    def bucket_started(self, bucket: InFlightBucket) -> None:
        """Keep the statistics that are sent with a bucket."""
        if bucket.stats is not None:
            self._unread.append(_PendingStats(bucket.work, bucket.stats))

    def bucket_counted(self, bucket: InFlightBucket) -> None:
        """Record what was lost, and start to copy the statistics to the host."""
        if bucket.residual_ratios is not None:
            names = [pending.segment.name for pending in bucket.pending]
            self._monitor.record_residuals(names, bucket.residual_ratios)
        self._monitor.record_mean(bucket.measurement, bucket.layout, bucket.buffer)
        if self._monitor.agreeing_groups:
            return  # they average the statistics first
        for stats in self._unread:
            if stats.mean is bucket.stats:
                stats.on_host = AsyncHostCopy(stats.mean)


class LossScaleObserver(ReducerObserver):
    """Lets the residuals follow the loss scale of a ``torch.amp.GradScaler``.

    When the scale changes, the residuals change by the same factor. When it decreases, the scaler has skipped the step
    before, because gradients held NaN or Inf; the residuals are then set back to what they were before that step.
    """

    def __init__(self, scaler: Any, reducer: Reducer) -> None:
        self._scaler, self._error_state = scaler, reducer.error_state
        self._error_state.keeps_backups = True
        self._fetched: AsyncHostCopy | None = None
        self.scale: float | None = None  # of the residuals; None before the first step

    def fetch(self) -> None:
        """Start to copy the scale to the host, before a forward pass, so that the backward pass does not wait."""
        scale = torch_compat.loss_scale(self._scaler)  # None until the scaler is first used
        self._fetched = None if scale is None else AsyncHostCopy(scale)

    def begin_pass(self, step: int, streams: Streams) -> None:
        """Apply a change of the scale to the residuals."""
        fetched, self._fetched = self._fetched, None
        scale = float(self._scaler.get_scale() if fetched is None else fetched.get())
        old = scale if self.scale is None else self.scale
        self.scale = scale
        self._error_state.begin_step(undo=scale < old)
        if scale != old:
            self._error_state.scale(scale / old)


class _StepMarks(NamedTuple):
    number: int
    begin: Any
    end: Any


class TunerObserver(ReducerObserver):
    """Gives the tuner of "auto", or a `Verifier`, the times of steps, and applies its choices.

    Steps are measured with timing events of the device, which are read once the device has passed them. On the CPU an
    event is a time, and has always passed.
    """

    def __init__(self, tuner: Tuner | Verifier, reducer: Reducer) -> None:
        self._tuner = tuner
        self._error_state, self._factors = reducer.error_state, reducer.averager.factors
        self._streams: Streams | None = None
        self._begin: Any = None
        self._steps: deque[_StepMarks] = deque()  # that the tuner does not know yet

    def begin_pass(self, step: int, streams: Streams) -> None:
        """Report the steps that are over, let the tuner choose, and drop the state of parameters that change."""
        if self._streams is None:
            self._streams = streams
            if isinstance(self._tuner, Tuner):
                self._tuner.set_device(streams.device)
        self._report(streams, wait=self._tuner.reads_clock(step))
        self._tuner.begin_step(step)
        if isinstance(self._tuner, Tuner):
            for name in self._tuner.pop_changes():
                self._factors.forget(name)
            for name in self._tuner.pop_uncompressed():
                self._error_state.repay_residual(name)
        self._begin = streams.mark()

    def end_pass(self, step: int, buckets: list[InFlightBucket]) -> None:
        """Mark the end of the step: the current stream waits for all its buckets."""
        assert self._streams is not None
        if isinstance(self._tuner, Tuner):
            self._tuner.buckets = len(buckets)
        self._steps.append(_StepMarks(step, self._begin, self._streams.mark()))

    def _report(self, streams: Streams, *, wait: bool) -> None:
        """Tell the tuner of each step that the device has finished; with ``wait`` the host waits for all steps."""
        while self._steps:
            step = self._steps[0]
            if not streams.query(step.end):
                if not wait:
                    return
                streams.synchronize(step.end)
            self._steps.popleft()
            self._tuner.end_step(step.number, streams.elapsed(step.begin, step.end))


class UncompressedObserver(ReducerObserver):
    """Logs once, on rank 0 and after the warm-up, what is not compressed, and that NVLink leaves nothing to gain."""

    def __init__(self, reducer: Reducer, warmup: int, group: dist.ProcessGroup | None) -> None:
        self._reducer, self._warmup, self._group = reducer, warmup, group

    def end_pass(self, step: int, buckets: list[InFlightBucket]) -> None:
        """Look at the codecs of the first step after the warm-up."""
        if step < self._warmup:
            return
        self._reducer.detach(self)
        totals: dict[str, ParameterTotals] = {}
        for bucket in buckets:
            bucket.layout.add_codecs_to(totals)
        text = describe_uncompressed(group_rows(totals.items()))
        if text and dist.get_rank() == 0:
            _log.warning("dtcomm.ddp: %s", text)
        if buckets and dist.get_rank() == 0 and nvlink_connects(buckets[0].buffer, self._group):
            _log.warning(
                "dtcomm.ddp: NVLink connects all ranks, which share a host: there is nothing to gain here. NCCL sums a "
                "bucket of 25 MiB in about 0.1 ms, less than the host takes to launch a codec's kernels (about %g us "
                "each) and calls (%g us); 'auto' measures it, 'none' sends uncompressed",
                HOST_KERNEL_US, HOST_CALL_US,
            )  # fmt: skip


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


class RegistrationObserver(ReducerObserver):
    """Requires in the first backward pass that all ranks have registered the hook, with the same options.

    DDP's constructor has just made the ranks wait for each other, so they register at nearly the same time.
    """

    def __init__(self, announcement: Announcement, reducer: Reducer) -> None:
        self._announcement, self._reducer = announcement, reducer

    def begin_pass(self, step: int, streams: Streams) -> None:
        """Wait until all ranks have registered the hook; CollectiveMismatch after a while, or if options differ."""
        self._announcement.require_all()
        self._reducer.detach(self)
