"""The reducer: averages the gradient buckets of a backward pass. `DDPState` owns one and the hook calls it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import torch_compat
from dtcomm.arguments import require_int
from dtcomm.collectives import all_reduce
from dtcomm.collectives.sparse import start_stages, sum_stages
from dtcomm.compress.bucket import BucketAverager, BucketLayout
from dtcomm.compress.error_state import ErrorState, PendingGradient, PreparedBucket
from dtcomm.compress.feedback import Feedback
from dtcomm.compress.measurements import GradientMeasurement
from dtcomm.compress.monitor import Monitor
from dtcomm.compress.stage_scheduler import StageScheduler
from dtcomm.compress.traffic import total_seconds
from dtcomm.ddp.layouts import BucketLayouts, Chooser, SparseLayout
from dtcomm.ddp.options import Options
from dtcomm.errors import PeerLost
from dtcomm.kernels import counter_rng
from dtcomm.profiling.timeline import AsyncRange
from dtcomm.streams import Streams, record_streams, streams_of
from dtcomm.torch_compat import GradBucket
from dtcomm.work import QueuedWork, Statistics, Work


@dataclass
class InFlightBucket:
    """A bucket from its preparation to the end of the backward pass.

    Attributes:
        buffer: Its flat buffer, or its sparse gradient, which becomes the mean.
        pending: The lossy segments.
        norms: Those of the gradients of ``pending`` in steps in which errors are measured, else None.
        stats: The guard's statistics that are averaged along with the bucket, or None.
        measurement: What the guard measured of this rank's gradients, or None.
        key: Chooses the random numbers with which residuals are rounded.
        ready_ns: When DDP called the hook (``time.monotonic_ns``, like the other two).
        launched_ns: When the hook returned.
        finished_ns: When the gradients were the mean and the residuals stored.
        finished: The future that DDP waits for.
        residual_ratios: What was lost over the gradient of each of ``pending``, L2 norms, once the bucket was counted.
    """

    index: int
    layout: BucketLayout
    buffer: torch.Tensor
    pending: list[PendingGradient]
    norms: torch.Tensor | None
    stats: torch.Tensor | None
    measurement: GradientMeasurement | None
    key: int
    ready_ns: int = 0
    launched_ns: int = 0
    finished_ns: int = 0
    work: Work = field(init=False)
    finished: torch.futures.Future[torch.Tensor] | None = None
    residual_ratios: torch.Tensor | None = None

    @property
    def plain_bytes(self) -> int:
        """The bytes of the uncompressed buffer; of a sparse one, of the entries and values that it has now."""
        if self.buffer.is_sparse:
            return sum(part.nbytes for part in torch_compat.sparse_parts(self.buffer))
        return self.buffer.numel() * self.buffer.element_size()


_JOIN_HINT = ". If it only had fewer inputs than the others, train inside `with model.join():`"


class ReducerObserver:
    """What a `Reducer` calls at fixed points of a backward pass; every method does nothing by default.

    The guard, "auto", the timeline and the recorder are observers (`dtcomm.ddp.observers`).
    """

    def begin_pass(self, step: int, streams: Streams) -> None:
        """The first bucket of a pass is ready; no collective of this group is in flight. It may raise."""

    def begin_backward(self) -> None:
        """As `begin_pass`, but only if the hook was called from autograd."""

    def bucket_ready(self, step: int, bucket: GradBucket) -> None:
        """A bucket is ready and unchanged."""

    def bucket_prepared(self, bucket: InFlightBucket) -> None:
        """A bucket's collective is about to start."""

    def bucket_started(self, bucket: InFlightBucket) -> None:
        """A bucket's collective was started."""

    def bucket_finished(self, bucket: InFlightBucket) -> None:
        """A bucket is the mean; called on a thread that completes futures, on a device on a side stream."""

    def end_compute(self) -> None:
        """All gradients are computed; the caller is about to wait for the buckets."""

    def bucket_counted(self, bucket: InFlightBucket) -> None:
        """A finished bucket was counted; called by the caller's thread, in order, before `end_pass`."""

    def end_pass(self, step: int, buckets: list[InFlightBucket]) -> None:
        """All buckets of the pass are finished, without an error."""


_EVENTS = tuple(name for name in vars(ReducerObserver) if not name.startswith("_"))


class Reducer:
    """Averages gradients over the ranks of a group, bucket by bucket, with error feedback.

    A backward pass goes through these steps. `reduce` does 1 to 5 for each bucket, and DDP runs other backward
    computation meanwhile:

    1. With the first bucket the observers begin the pass: the guard evaluates the statistics of the last step,
       "auto" chooses codecs, and both reset state of parameters whose codec changes (`_begin_pass`).
    2. The bucket gets a layout: one segment for each compressed parameter, under the codec that policy, guard, warm-up
       and "auto" choose (`BucketLayouts.of`).
    3. Every lossy segment is prepared: error feedback decides which tensor is averaged and which residual is added to
       it (`_prepare`, `ErrorState.prepare`).
    4. The collective starts: one packed message for the bucket, or several in stages if PowerSGD is among its codecs,
       or a plain all-reduce (`_start`). The guard's statistics are sent with the last bucket. A sparse gradient, which
       has a bucket of its own, is averaged uncompressed by the stages of a sparse all_reduce (`_start_sparse`).
    5. When it completes, on whatever thread that happens, the gradients are the mean and the residuals are stored; then
       the future that DDP waits for gets the buffer (`_finish_when_done`, `ErrorState.finish`).
    6. At the end of the backward pass the reducer waits for all buckets, counts what they sent and lost, raises the
       first error, and the observers end the pass (`_end_pass`).

    On a device nothing of this makes the host wait: step 5 runs on a side stream.

    Args:
        group: The process group; None is the default group.
        chooser: Chooses the scheme of each parameter.
        monitor: The guard's monitor.
        parameters: The (name, parameter) pairs of the model.
        feedback: The kind of error feedback.
        options: All options of the state.

    Attributes:
        steps: The number of passes that were reduced.
        error: The first error of a collective. After it, every call raises it.
        finish_before_ddp: Wait for the buckets before DDP's own callback (`_end_compute`).
        divides_by_active: Whether DDP's ``join`` asks to divide by the ranks that still have inputs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        chooser: Chooser,
        monitor: Monitor,
        parameters: Iterable[tuple[str, torch.Tensor]] | None,
        feedback: bool | str | Feedback,
        options: Options,
    ) -> None:
        self.steps = 0
        self.error: Exception | None = None
        self.finish_before_ddp = False
        self._used: set[int] | None = None  # by id, since they were last reduced; None: every parameter
        self._use_hooks: list[Any] = []
        self.divides_by_active: Callable[[], bool] = lambda: False
        self._callbacks: dict[str, list[Callable[..., None]]] = {event: [] for event in _EVENTS}
        self.error_state = ErrorState(feedback, options["residual"], chooser.schemes)
        self.averager = BucketAverager(options["algorithm"], group, options["seed"], chooser.schemes)
        self.layouts = BucketLayouts(chooser, monitor, self.averager, options["warmup"], parameters)
        self._group, self._chooser, self._monitor = group, chooser, monitor
        self._sample_every = options["sample_every"]
        self._streams: Streams | None = None  # of the gradients' device, known with the first bucket
        self._scheduler: StageScheduler | None = None
        self._in_flight: list[InFlightBucket] = []
        self._in_backward = False
        self._awaits_end = False  # whether autograd will call `_end_compute`
        self._complete = False  # whether the last bucket of the pass was started
        self._ranks, self._key = 1, 0  # of this pass
        self._samples: tuple[int, int] | None = (
            None  # of this rank and of all ranks in a pass; None: the same on all
        )
        self._active = 0  # ranks that have inputs in this pass, where gradients are divided by them
        self._waiting = AsyncRange("")

    def set_samples(self, samples: int, total: int) -> None:
        """Weight this rank's gradients, from the next bucket on; see `dtcomm.ddp.DDPState.set_samples`."""
        require_int("samples", samples, 1)
        require_int("total", total, samples)
        self._samples = samples, total

    def track_use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note which parameters backward passes use; for models in which it may be that no rank uses one."""
        used = self._used = set()
        for parameter in parameters:
            if parameter.requires_grad:
                key = id(parameter)
                handle = parameter.register_hook(lambda _, key=key: used.add(key))  # type: ignore[no-untyped-call]
                self._use_hooks.append(handle)

    def release(self) -> None:
        """Remove the hooks of `track_use`, and free what is kept from step to step."""
        while self._use_hooks:
            self._use_hooks.pop().remove()
        self.error_state = ErrorState(False)
        self.averager.factors.load_state_dict({})

    def _pop_unused(self, layout: BucketLayout) -> list[str]:
        """Return the parameters of a bucket that this rank has not used since it was last reduced."""
        used = self._used
        if used is None:
            return []
        unused = [
            name for name, key in zip(layout.names, layout.parameter_ids, strict=True) if key not in used
        ]
        used.difference_update(layout.parameter_ids)
        return unused

    def attach(self, observer: ReducerObserver) -> None:
        """Call the observer's methods from now on, after those of the observers that were attached before."""
        for event in _EVENTS:
            if getattr(type(observer), event) is not getattr(ReducerObserver, event):
                self._callbacks[event].append(getattr(observer, event))

    def detach(self, observer: ReducerObserver) -> None:
        """Call the observer's methods no longer."""
        for event in _EVENTS:
            self._callbacks[event] = [
                callback
                for callback in self._callbacks[event]
                if getattr(callback, "__self__", None) is not observer
            ]

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a bucket in place; the future holds its buffer once that is done."""
        ready_ns = time.monotonic_ns()
        buffer = bucket.buffer()
        streams = self._streams = self._streams or streams_of(buffer.device)
        if bucket.index() == 0:
            self._begin_pass(streams)
        elif self._in_backward and not self._awaits_end:  # the callback came before the last bucket
            self._await_end()
        profiler_range = AsyncRange(f"bucket {bucket.index()}")
        try:
            if self.error is not None:
                raise self.error
            in_flight = self._launch(bucket, buffer, streams)
        except Exception as error:
            if not self._in_backward:
                raise
            self.error = error  # `_end_pass` raises it, after autograd and DDP are done
            profiler_range.end()
            failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            failed.set_result(buffer)
            return failed
        self._in_flight.append(in_flight)
        if bucket.is_last():
            self.steps += 1
            self._complete = True
        in_flight.finished = profiler_range.until(self._finish_when_done(in_flight, streams))
        in_flight.ready_ns, in_flight.launched_ns = ready_ns, time.monotonic_ns()
        return in_flight.finished

    def _begin_pass(self, streams: Streams) -> None:
        # Buckets may be left by a backward pass that an error cut short, or by DDP's join(), which reduces outside one.
        left, self._in_flight = self._in_flight, []
        if self._scheduler is not None:
            self._scheduler.restart()
        for bucket in left:
            if bucket.finished is not None and bucket.finished.done() and self.error is None:
                self._count(bucket)
        self._ranks = dist.get_world_size(self._group)
        self._key = counter_rng.mix_key(self.averager.seed, dist.get_rank(self._group), self.steps)
        for begin_pass in self._callbacks["begin_pass"]:
            try:
                if self.error is None:
                    begin_pass(self.steps, streams)
            except Exception as error:
                self.error = error
        self._complete = False
        self._await_end()
        self._active = self._count_active(streams) if self.divides_by_active() else 0
        if not self._in_backward:
            return
        for begin_backward in self._callbacks["begin_backward"]:
            begin_backward()

    def _await_end(self) -> None:
        """Let autograd call `_end_compute` at the end of the backward pass that it is in."""
        try:
            torch_compat.after_backward(self._end_compute)
        except RuntimeError:  # called outside a backward pass: errors go into the futures
            self._in_backward = self._awaits_end = False
        else:
            self._in_backward = self._awaits_end = True

    def _count_active(self, streams: Streams) -> int:
        """Return how many ranks have inputs; DDP's join calls the hook of the others outside a backward pass."""
        active = torch.tensor([float(self._in_backward)], device=streams.device)
        try:
            all_reduce(active, group=self._group)
            return round(float(active))
        except Exception as error:
            self.error = self.error or error
            return 0

    def _launch(self, bucket: GradBucket, buffer: torch.Tensor, streams: Streams) -> InFlightBucket:
        """Prepare a bucket and start its collective."""
        layout = self.layouts.of(bucket, buffer, self.steps, self._ranks)
        weight = 1.0
        if self._samples is not None:
            # The average of the weighted gradients is the sum of samples / total * gradient.
            weight = self._ranks * self._samples[0] / self._samples[1]
        elif self._active:
            weight = self._ranks / self._active
        if weight != 1:
            buffer.mul_(weight)
        for bucket_ready in self._callbacks["bucket_ready"]:
            bucket_ready(self.steps, bucket)
        # Nothing is measured of a bucket that is sent uncompressed: that took 4 % of a step in which nothing pays.
        measurement = self._monitor.measure_gradient(layout, buffer) if layout.lossy else None
        prepared = self._prepare(layout, buffer)
        stats = None
        if bucket.is_last() and not self._chooser.bypass:
            stats = self._monitor.stats_tensor(buffer.device)
        in_flight = InFlightBucket(
            bucket.index(),
            layout,
            buffer,
            prepared.pending,
            prepared.norms,
            stats,
            measurement,
            self._key,
        )
        for bucket_prepared in self._callbacks["bucket_prepared"]:
            bucket_prepared(in_flight)
        in_flight.work = self._start(in_flight, prepared, streams, last=bucket.is_last())
        for bucket_started in self._callbacks["bucket_started"]:
            bucket_started(in_flight)
        return in_flight

    def _prepare(self, layout: BucketLayout, buffer: torch.Tensor) -> PreparedBucket:
        """Apply error feedback."""
        if isinstance(layout, SparseLayout):
            return PreparedBucket([buffer], [None])
        sampled = self._sample_every > 0 and self.steps % self._sample_every == 0
        return self.error_state.prepare_bucket(
            layout, buffer, self._ranks, unused=self._pop_unused(layout), sampled=sampled
        )

    def _start(
        self,
        bucket: InFlightBucket,
        prepared: PreparedBucket,
        streams: Streams,
        *,
        last: bool,
    ) -> Work:
        """Start the collective of a bucket."""
        tensors, residuals = prepared.tensors, prepared.residuals
        if isinstance(bucket.layout, SparseLayout):
            return self._start_sparse(bucket, streams, last=last)
        if self._chooser.bypass:
            return plain_all_reduce(bucket.buffer, self._group, streams)
        if not self._chooser.in_stages:
            return self.averager.all_reduce(bucket.layout, tensors, residuals, bucket.stats, self.steps)
        stages = self.averager.stages(
            bucket.layout, tensors, residuals, bucket.stats, self.steps, staged=True
        )
        used = [*tensors, *residuals, bucket.stats]
        return self._scheduler_on(streams).submit(stages, [bucket.buffer], used, last=last)

    def _start_sparse(self, bucket: InFlightBucket, streams: Streams, *, last: bool) -> Work:
        """Start averaging a sparse gradient; the guard's statistics are sent with its values.

        The call waits until the ranks have exchanged their entries. Where buckets are averaged in stages, these
        collectives are in the order of the scheduler too, and its thread waits.
        """
        step = self.steps  # `sum_rows` may be called when it is larger
        staged = self._chooser.in_stages and not self._chooser.bypass

        def sum_rows(rows: torch.Tensor) -> Work:
            return self.averager.all_reduce(bucket.layout, [rows], [None], bucket.stats, step, staged=staged)

        group = self.averager.staged_group if staged else self._group
        stages = sum_stages(bucket.buffer, sum_rows, group)
        if not staged:
            return start_stages(stages, bucket.buffer)
        return self._scheduler_on(streams).submit(stages, [bucket.buffer], [bucket.stats], last=last)

    def _scheduler_on(self, streams: Streams) -> StageScheduler:
        if self._scheduler is None:
            self._scheduler = StageScheduler(streams)
        return self._scheduler

    def _finish_when_done(
        self, bucket: InFlightBucket, streams: Streams
    ) -> torch.futures.Future[torch.Tensor]:
        """Return the future of a finished bucket: its gradients are the mean, and its residuals are stored."""
        finished: torch.futures.Future[Any] = streams.future()
        carries_error = not self._in_backward
        # Emptied before the future is completed: the callback may run on a thread of the group's backend, which must
        # not be left with the last reference to the group. Gloo's would then join itself, and the process would end.
        arguments = [(self, bucket, streams)]

        def finish(done: torch.futures.Future[Any]) -> None:
            reducer, bucket, streams = arguments.pop()
            buffer, raised = bucket.buffer, None
            try:
                done.value()
                # Not the callback's own stream: the allocator would not know that it uses these tensors.
                with streams.on(streams.side_stream()):
                    reducer._finish(bucket)
            except Exception as error:
                reducer.error = reducer.error or error
                raised = error if carries_error else None
            del reducer, bucket
            if raised is not None:
                finished.set_exception(raised)
                return
            with streams.on(streams.side_stream()):
                finished.set_result(buffer)

        bucket.work.get_future().add_done_callback(finish)
        return finished

    def _finish(self, bucket: InFlightBucket) -> None:
        bucket.work.wait()
        record_streams(bucket.buffer)
        for pending in bucket.pending:
            self.error_state.finish(pending, bucket.key)
        if bucket.norms is None:
            bucket.pending = []  # frees the fp32 residuals that are kept in fewer bytes
        bucket.finished_ns = time.monotonic_ns()
        for bucket_finished in self._callbacks["bucket_finished"]:
            bucket_finished(bucket)

    def _end_compute(self) -> None:
        """Called by autograd when all gradients are computed, before DDP's own callback, which waits for the futures.

        Another callback, queued behind DDP's, waits for the buckets and raises errors: DDP's timers then see the
        waiting, and DDP is done with its step when an error is raised. Only if DDP itself reduces a map of unused
        parameters (``finish_before_ddp``) the waiting comes first: DDP would fail over a lost peer with an error of
        its own.

        Reentrant checkpoints run backward passes within the backward pass, at whose ends autograd calls this too. It
        must not wait then: stages of these buckets start with the next ones, on the thread that would wait.
        """
        self._awaits_end = False
        if not self._complete and self.error is None:
            return
        for end_compute in self._callbacks["end_compute"]:
            end_compute()
        self._waiting = AsyncRange("waiting for communication")
        for bucket in self._in_flight:  # here an interrupt ends the wait; DDP's would last until the timeout
            with contextlib.suppress(Exception):  # `_end_pass` raises it
                bucket.work.wait()
        if self.finish_before_ddp:
            self._end_pass()
        else:
            torch_compat.after_backward(self._end_pass)

    def _end_pass(self) -> None:
        buckets, self._in_flight = self._in_flight, []
        for bucket in buckets:
            try:
                bucket.work.wait()
                if bucket.finished is not None:
                    bucket.finished.wait()  # the collective completes a little earlier than this
                self._count(bucket)
            except Exception as error:
                self.error = self.error or error
        self._waiting.end()
        if isinstance(self.error, PeerLost) and _JOIN_HINT not in str(self.error):
            self.error.args = (f"{self.error}{_JOIN_HINT}",)
        if self.error is not None:
            raise self.error
        for end_pass in self._callbacks["end_pass"]:
            end_pass(self.steps - 1, buckets)

    def _count(self, bucket: InFlightBucket) -> None:
        """Count what a finished bucket sent and lost."""
        layout, cost = bucket.layout, bucket.work.statistics()
        layout.messages += 1
        layout.wire_bytes += cost.wire_bytes
        layout.seconds = total_seconds((layout.seconds, cost.seconds))
        if bucket.norms is not None:
            lost = [pending.residual for pending in bucket.pending]
            bucket.residual_ratios = layout.add_sample(bucket.norms, lost)
        for bucket_counted in self._callbacks["bucket_counted"]:
            bucket_counted(bucket)


def plain_all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup | None, streams: Streams) -> Work:
    """Start an all-reduce of a buffer by the group's own backend, with the bits that DDP has without a hook.

    Like DDP it multiplies the buffer by 1 / ranks before the all-reduce.
    """
    ranks = dist.get_world_size(group)
    wire_bytes = 2 * (ranks - 1) * buffer.numel() * buffer.element_size() // ranks
    work = QueuedWork([buffer], streams)
    buffer.mul_(1.0 / ranks)
    started_ns = time.monotonic_ns()

    def complete(done: torch.futures.Future[Any]) -> None:
        finished_ns = time.monotonic_ns()
        try:
            done.value()  # raises the error of the all-reduce
        except Exception as error:
            work.fail(error)
        else:
            seconds = (finished_ns - started_ns) * 1e-9
            work.complete(streams.record(), Statistics(wire_bytes, seconds, started_ns, finished_ns))

    torch_work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    torch_work.get_future().add_done_callback(complete)
    return work
