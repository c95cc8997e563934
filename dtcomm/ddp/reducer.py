"""What happens to the buckets of a backward pass, from the hook's call to the gradients' arrival."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, where type checkers find it

from dtcomm.collectives import Work
from dtcomm.compress.bucket_averager import BucketAverager
from dtcomm.compress.error_sample import ErrorSample, l2_norm
from dtcomm.compress.error_state import ErrorState, PendingGradient
from dtcomm.compress.guard_monitor import Monitor
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.stage_scheduler import StageScheduler
from dtcomm.compress.step_recorder import StepRecorder
from dtcomm.ddp.autotune.measure import BucketTiming
from dtcomm.ddp.bucket_layouts import BucketLayouts
from dtcomm.ddp.chooser import Chooser
from dtcomm.ddp.device_reducer import There
from dtcomm.ddp.in_flight_bucket import InFlightBucket
from dtcomm.ddp.plain_allreduce import PlainAllReduceWork
from dtcomm.device.streams import AsyncHostCopy, streams_of
from dtcomm.kernels import counter_rng
from dtcomm.profiling import Timeline
from dtcomm.profiling.profiler_ranges import UnderWay


class Reducer:
    """``steps`` are over; ``error`` is the first one that any of them had. `wait_before_ddp`: DDP reduces a map of
    unused parameters after the pass; `may_leave_unused`: it may be that no rank uses some parameter.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        chooser: Chooser,
        watch: Monitor,
        packings: BucketLayouts,
        memory: ErrorState,
        averager: BucketAverager,
        timeline: Timeline,
        sample_every: int,
    ) -> None:
        self.steps = 0
        self.error: Exception | None = None
        self.wait_before_ddp = False
        self.may_leave_unused = True
        self.recorder: StepRecorder | None = None
        self._group, self._sample_every = group, sample_every
        self._chooser, self._watch, self._layouts = chooser, watch, packings
        self._error_state, self._averager, self._timeline = memory, averager, timeline
        # Where buckets take several collectives, all of them start on one thread, in an order that ranks share.
        in_stages = any(isinstance(scheme, PowerSGD) for scheme in chooser.schemes)
        self._sequencer = StageScheduler(streams_of(torch.device("cpu"))) if in_stages else None
        self._there: There | None = None  # where gradients are on a device
        self._told: deque[InFlightBucket] = deque()
        self._flights: list[InFlightBucket] = []
        self._begun = 0.0  # this step's first bucket
        self._waiting = UnderWay("")
        self._in_backward = False

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging the bucket in place; the future holds its buffer once that is done."""
        ready_ns = time.monotonic_ns()
        if self._there is None and not bucket.buffer().is_cpu:
            self._there = There(bucket.buffer().device, self._chooser)
        if bucket.index() == 0:
            self._begin()
        buffer, under_way = bucket.buffer(), UnderWay(f"bucket {bucket.index()}")
        try:
            if self.error is not None:
                raise self.error
            flight = self._launch(bucket, buffer)
        except Exception as error:
            if not self._in_backward:
                raise
            self.error = error
            under_way.end()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        self._flights.append(flight)
        if bucket.is_last():
            self.steps += 1
        landed = (
            flight.work.get_future().then(self._landing(flight))
            if self._there is None
            else self._there.land(flight, self._error_state, self._failed())
        )
        flight.done = under_way.until(landed)
        flight.index, flight.ready_ns, flight.launched_ns = bucket.index(), ready_ns, time.monotonic_ns()
        return flight.done

    def _landing(self, flight: InFlightBucket) -> Callable[[torch.futures.Future[Any]], torch.Tensor]:
        # Emptied before the future is done: this may run on a thread of the group's backend, and that must not be left
        # with the last reference to the group. Gloo's would then wait for itself, and the process end.
        held = [(self, flight, not self._in_backward)]

        def land(future: torch.futures.Future[Any]) -> torch.Tensor:
            backward, flight, carries_error = held.pop()
            try:
                future.value()
                flight.land(backward._error_state)
                flight.done_ns = time.monotonic_ns()
            except Exception as error:
                backward.error = backward.error or error
                if carries_error:
                    raise
            return flight.buffer

        return land

    def _failed(self) -> Callable[[Exception], bool]:
        """For a bucket that is launched now."""
        carries_error = not self._in_backward

        def failed(error: Exception) -> bool:
            self.error = self.error or error
            return carries_error

        return failed

    def _begin(self) -> None:
        """The first bucket of a step is there: nothing is under way on any rank."""
        # Left by a backward that some error cut short, or by DDP's join(), which reduces outside of one.
        left, self._flights = self._flights, []
        if self._sequencer is not None:
            self._sequencer.restart()
        if self._there is not None:
            self._there.restart()
        for flight in left:
            if flight.done is not None and flight.done.done() and self.error is None:
                flight.settle(self._watch)
        self._judge()
        self._begun = time.perf_counter()
        if self.error is None:
            self._choose()
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self._in_backward = True
            if self._timeline.on:
                self._timeline.backward_begins()
        except RuntimeError:  # called by hand, outside of a backward: the future must carry an error itself
            self._in_backward = False

    def _judge(self) -> None:
        """Decide, on what all ranks told each other in the step before; the same on all of them.

        On a device one step later: what it told two steps ago has come to the host by now, and nobody waits for it.
        """
        try:
            while len(self._told) > (0 if self._there is None else 1):
                flight = self._told.popleft()
                if flight.told is not None:
                    flight.work.wait()
                    heard = flight.heard or AsyncHostCopy(flight.told)
                    self._watch.evaluate(self.steps, heard.get())
        except Exception as error:
            self.error = self.error or error
        self._watch.begin_step(self.steps)
        for name in self._watch.pop_resets():
            self._error_state.reset(name)
        for name in self._watch.pop_changes():
            self._averager.factors.forget(name)

    def _choose(self) -> None:
        if self._there is not None:
            self._there.tell(self._chooser, self.steps)
        try:
            self._chooser.begin(self.steps)
        except Exception as error:
            self.error = error
            return
        for name in self._chooser.pop_changes():
            self._averager.factors.forget(name)
        for name in self._chooser.pop_uncompressed():
            self._error_state.repay_residual(name)
        self._begun = time.perf_counter()
        if self._there is not None:
            self._there.begin()

    def _launch(self, bucket: GradBucket, buffer: torch.Tensor) -> InFlightBucket:
        ranks = dist.get_world_size(self._group)
        packing = self._layouts.of(bucket, buffer, self.steps, ranks)
        if self._chooser.wants(self.steps):
            self._chooser.look(bucket.index(), self._layouts.names(bucket), bucket.gradients())
        sampled = self._sample_every > 0 and self.steps % self._sample_every == 0
        samples: list[ErrorSample] | None = [] if sampled else None
        handed: list[PendingGradient] = []
        tensors: list[torch.Tensor] = []
        residuals: list[torch.Tensor | None] = []
        for segment, tensor in zip(packing.segments, packing.split(buffer), strict=True):
            if segment.lossless:
                self._error_state.prepare_uncompressed(segment, tensor)
                tensors.append(tensor)
                residuals.append(None)
                continue
            norm = l2_norm(tensor) if sampled else 0.0
            given = self._error_state.prepare(
                segment, tensor, ranks, may_be_unused=self.may_leave_unused, sampled=sampled
            )
            if samples is not None:
                samples.append(
                    ErrorSample.take(segment.name, segment.codec, norm, given.sent, given.residual)
                )
                self._watch.register_sample(segment.name, segment.codec)
            handed.append(given)
            tensors.append(given.sent)
            residuals.append(given.residual)
        last, told = bucket.is_last(), None
        if last and not self._chooser.own and (found := self._watch.stats_tensor(buffer.device)) is not None:
            told = found
        ready_there = None if self._there is None else self._there.ready()
        if self._chooser.own:  # nothing is lost, and nobody watches
            work: Work = PlainAllReduceWork(buffer, self._group)
        elif self._sequencer is not None and self._chooser.in_stages:
            stages = self._averager.stages(packing, tensors, residuals, told, self.steps)
            if self._there is None:
                work = self._sequencer.submit(stages, [buffer], last=last)
            else:
                work = self._there.submit(stages, buffer, [*tensors, *residuals, told], last=last)
        else:
            work = self._averager.all_reduce(packing, tensors, residuals, told, self.steps)
        key = counter_rng.mix_key(self._averager.seed, dist.get_rank(self._group), self.steps)
        flight = InFlightBucket(work, packing, buffer, handed, samples, told, key, ready_there=ready_there)
        if told is not None:
            self._told.append(flight)
        return flight

    def _end(self) -> None:
        """Runs before DDP's own callback, which waits for the futures; another, after it, raises the errors.

        So DDP's timers see the waiting, and DDP is through with its step when the error comes. Only where DDP
        itself reduces a map of unused parameters would it trip over a lost peer before we could say so.
        """
        if self._timeline.on:
            self._timeline.backward_ends()
        self._waiting = UnderWay("waiting for communication")
        if self.wait_before_ddp:
            self._settle()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._settle)

    def _settle(self) -> None:
        flights, self._flights = self._flights, []
        for flight in flights:
            try:
                flight.work.wait()
                if flight.done is not None:
                    flight.done.wait()  # the mean is there a little before it has landed
                flight.settle(self._watch)
            except Exception as error:
                self.error = self.error or error
        self._waiting.end()
        if self.error is not None:
            raise self.error
        if self._timeline.on:
            self._timeline.close([flight.message for flight in flights], at_end=True)
        sent = [flight.sent for flight in flights]
        if self._there is not None:
            self._there.end(self.steps - 1, flights)
        else:
            buckets = [
                BucketTiming(each.ready - self._begun, each.took, flight.work.wire_bytes)
                for each, flight in zip(sent, flights, strict=True)
            ]
            self._chooser.end(self.steps - 1, time.perf_counter() - self._begun, buckets)
        if self.recorder is not None and self.recorder.step(sent):
            self.recorder = None
