"""What the DDP hook remembers between steps, and what it does with a bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, where type checkers find it

from dtcomm.collectives import Work
from dtcomm.compress.auto import NAME as AUTO
from dtcomm.compress.auto import Auto
from dtcomm.compress.average import NONE, Averager
from dtcomm.compress.checkpoint import VERSION, require_fit, share_of
from dtcomm.compress.guard import Event, Guard, Sample, Watch, summary
from dtcomm.compress.memory import Handed, Memory
from dtcomm.compress.policy import Policy, as_policy
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.record import Recorder
from dtcomm.compress.report import Report, Tally, rows
from dtcomm.compress.scheme import Scheme
from dtcomm.compress.sequence import Sequencer
from dtcomm.ddp.figures import Timed
from dtcomm.ddp.flight import Flight
from dtcomm.ddp.meet import Group
from dtcomm.ddp.own import OwnWork
from dtcomm.ddp.packings import Packings
from dtcomm.ddp.tuner import Tuner
from dtcomm.insight import Metric, Timeline
from dtcomm.insight.ranges import UnderWay
from dtcomm.kernels import mixer

_GUARD = Guard()


class State:
    """What the hook remembers: which codec each parameter gets, the residuals, and what was counted.

    spec: a codec or compressor (or its spec: "int8", "powersgd:rank=4"), which goes to matrices under
        `default_policy`; or a `Policy` (or its text). "auto": measured in the first steps, and chosen by what pays.
    group: the process group of the model; None is the default group.
    feedback: keep each rank's encoding errors and add them to the next gradient, per parameter; or "ef21" or "diana":
        send differences to what all ranks know already.
    residual: how residuals are kept between the steps: "fp32", "bf16" or "int8".
    algorithm: of the all-reduce. With the direct ones a result does not depend on the bucket a parameter is
        in, so a run resumed from a checkpoint continues bit for bit though DDP starts with other buckets.
    seed: of stochastic rounding; mixed with the step.
    parameters: (name, parameter) pairs, as of ``module.named_parameters()``. Without them a parameter is
        called ``parameter.K`` where K counts the parameters in the order in which buckets first bring them.
        That order is DDP's, the same in every process and every run with the same model and bucket size.
    sample_every: measure the relative error on every step whose number it divides; 0: never.
    guard: limits beyond which compression counts as harmful, and what is done then; None: nothing is watched.
        What happened is in ``state.events`` and the report.
    warmup: steps at the start of training that are sent uncompressed.
    timeline: keep the times of so many last steps, for ``timeline.summary()`` and `trace`; 0: look at no clock
        (``timeline.start()`` begins at any step).
    budget, candidates, check_every: of "auto": the largest relative error of an encoding (0.2 by default), the schemes
        to choose from (none, fp16, int8, int4 by default; naming them allows them whatever their error), and the steps
        after which the link is looked at again.
    """

    def __init__(
        self,
        spec: str | Scheme | Policy = "int8",
        group: dist.ProcessGroup | None = None,
        feedback: bool | str = True,
        *,
        residual: str = "fp32",
        algorithm: str = "direct",
        seed: int = 0,
        parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        sample_every: int = 50,
        guard: Guard | None = _GUARD,
        warmup: int = 0,
        timeline: int = 0,
        budget: float | None = None,
        candidates: Sequence[str | Scheme] | None = None,
        check_every: int = 500,
    ) -> None:
        if sample_every < 0:
            raise ValueError(f"sample_every={sample_every}: want 0 (never) or more")
        if warmup < 0:
            raise ValueError(f"warmup={warmup}: want 0 or more steps")
        self._tuner: Tuner | None = None
        if spec == AUTO:
            auto = Auto(budget=budget, candidates=candidates, every=check_every)
            self._tuner = Tuner(auto, Group(group))
        elif budget is not None or candidates is not None:
            raise ValueError(f"spec: budget and candidates go with {AUTO!r}, got {spec!r}")
        self.policy = as_policy(NONE if self._tuner is not None else spec)
        self.group = group
        self.feedback = feedback
        self.algorithm = algorithm
        self.sample_every = sample_every
        self.steps = 0
        self.error: Exception | None = None
        schemes = [rule.codec for rule in self.policy.rules]
        if self._tuner is not None:
            schemes = list(self._tuner.auto.schemes)
        self._memory = Memory(feedback, residual, schemes)
        self._averager = Averager(algorithm, group, seed)
        # Where buckets take several collectives, all of them start on one thread, in an order that ranks share.
        in_stages = any(isinstance(scheme, PowerSGD) for scheme in schemes)
        self._sequencer = Sequencer() if in_stages else None
        # Where nothing is lost nothing can be harmful.
        lossy = any(scheme != NONE for scheme in schemes)
        self._watch = Watch(guard) if guard is not None and lossy else None
        self._told: Flight | None = None
        self._packings = Packings(self.policy, self._watch, warmup, parameters, self._tuner)
        self._flights: list[Flight] = []
        self._begun = 0.0  # this step's first bucket
        self._recorder: Recorder | None = None
        self.timeline = Timeline("ddp")
        if timeline:
            self.timeline.start(timeline)
        self._waiting = UnderWay("")
        self._in_backward = False
        # What `compress` finds out about the model: see `_end_backward` and `_launch`.
        self._wait_before_ddp = False
        self._may_leave_unused = True

    @property
    def seed(self) -> int:
        """Of stochastic rounding."""
        return self._averager.seed

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard saw and did, and what "auto" chose, each in order; the same on all ranks."""
        seen = [] if self._watch is None else self._watch.events
        return (*seen, *(() if self._tuner is None else self._tuner.decisions))

    def observe(self, loss: float | torch.Tensor) -> None:
        """Tell the guard this step's loss, once a step and before its backward, on every rank."""
        if self._watch is not None:
            self._watch.observe(float(loss))

    def report(self) -> Report:
        """What was compressed, with what, and what it saved, up to the last finished backward."""
        events = {
            name: summary([event for event in self.events if event.name == name])
            for name in {event.name for event in self.events}
        }
        packings = [*self._packings.retired, *self._packings.current.values()]
        tallies: dict[str, Tally] = {}
        memory = self._memory.nbytes()
        if factors := self._averager.factors.nbytes():
            memory["factors"] = factors
        for packing in packings:
            packing.add_to(tallies)
        return Report(
            policy=AUTO if self._tuner is not None else str(self.policy),
            feedback=self.feedback,
            steps=self.steps,
            messages=sum(packing.messages for packing in packings),
            wire_bytes=sum(packing.wire_bytes for packing in packings),
            plain_bytes=round(sum(packing.plain_bytes for packing in packings)),
            seconds=sum(packing.seconds for packing in packings),
            residual_bytes=self._memory.held(),
            memory=memory,
            events={} if self._watch is None else summary(self._watch.events),
            auto=() if self._tuner is None else tuple(map(str, self._tuner.decisions)),
            plans=() if self._tuner is None else tuple(self._tuner.rows),
            rows=rows(tallies.items()),
            buckets=tuple(
                packing.row(index, events) for index, packing in sorted(self._packings.current.items())
            ),
        )

    def metrics(self) -> list[Metric]:
        """The report's, and the timeline's where one is kept, for `dtcomm.insight.write_prometheus` and
        `write_tensorboard`.
        """
        return self.report().metrics() + self.timeline.metrics()

    def trace(self, path: str | os.PathLike[str]) -> str:
        """Write this rank's kept steps for Perfetto or chrome://tracing: ``trace.json`` becomes ``trace.rank0.json``,
        whose path is returned. ``dtcomm trace`` merges the ranks' files. ValueError where no step was kept.
        """
        return self.timeline.trace(path, dist.get_rank(self.group))

    def record(self, path: str | os.PathLike[str], steps: int = 20) -> None:
        """Write when the buckets of the next ``steps`` steps were ready and how long each was under way, for
        `dtcomm plan --record`. Rank 0 of the group writes, once the step after them has begun.
        """
        first = dist.get_rank(self.group) == 0
        ranks = dist.get_world_size(self.group)
        self._recorder = Recorder(path, steps, ranks, str(self.policy), first)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by ``factor``: for a loss scale that changed by it between two steps."""
        self._memory.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, and the counters; every rank saves its own."""
        return {
            "version": VERSION,
            "steps": self.steps,
            "seed": self.seed,
            "rank": dist.get_rank(self.group),
            "world_size": dist.get_world_size(self.group),
            **self._memory.state_dict(),
            "factors": self._averager.factors.state_dict(),
            "watch": {} if self._watch is None else self._watch.state_dict(),
            "auto": {} if self._tuner is None else self._tuner.state_dict(),
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Continue from `state_dict`: this rank's own, or the list of every rank's in rank order.

        From a list, the residuals are shared out so that their sum over ranks is kept, whatever the number of
        ranks now (``rank`` of ``world_size``, by default the group's). ValueError where one state alone comes
        from another number of ranks, or where its parameters are not this model's.
        """
        rank = dist.get_rank(self.group) if rank is None else rank
        world_size = dist.get_world_size(self.group) if world_size is None else world_size
        first, residuals = share_of(state, rank, world_size)
        sizes = self._packings.sizes()
        if sizes is not None:
            require_fit(residuals, sizes)
        self._memory.load(state, residuals, rank, world_size)
        self._averager.factors.load_state_dict(first.get("factors", {}))
        if self._watch is not None:
            self._watch.load_state_dict(first.get("watch", {}))
        if self._tuner is not None:
            # Another number of ranks makes another link of it.
            same = first["world_size"] == world_size
            self._tuner.load_state_dict(first.get("auto", {}) if same else {})
        self.steps, self._averager.seed = first["steps"], first["seed"]

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging the bucket in place; the future holds its buffer once that is done."""
        buffer = bucket.buffer()
        ready_ns = time.monotonic_ns()
        if bucket.index() == 0:
            self._begin_backward()
        under_way = UnderWay(f"bucket {bucket.index()}")
        done: torch.futures.Future[torch.Tensor]
        try:
            if self.error is not None:
                raise self.error
            flight = self._launch(bucket, buffer)
        except Exception as error:
            if not self._in_backward:
                raise
            self.error = error
            under_way.end()
            done = torch.futures.Future()
            done.set_result(buffer)
            return done
        self._flights.append(flight)
        if bucket.is_last():
            self.steps += 1
        carries_error = not self._in_backward

        def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                future.value()
                flight.land(self._memory)
                flight.done_ns = time.monotonic_ns()
            except Exception as error:
                self.error = self.error or error
                if carries_error:
                    raise
            return buffer

        flight.done = under_way.until(flight.work.get_future().then(finish))
        flight.index, flight.ready_ns, flight.launched_ns = bucket.index(), ready_ns, time.monotonic_ns()
        return flight.done

    def _begin_backward(self) -> None:
        # Left by a backward that some error cut short, or by DDP's join(), which reduces outside of one.
        left, self._flights = self._flights, []
        if self._sequencer is not None:
            self._sequencer.restart()
        for flight in left:
            if flight.done is not None and flight.done.done() and self.error is None:
                flight.settle(self._watch)
        self._judge()
        self._begun = time.perf_counter()
        if self._tuner is not None and self.error is None:
            self._tune(self._tuner)
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._in_backward = True
            if self.timeline.on:
                self.timeline.backward_begins()
        except RuntimeError:  # called by hand, outside of a backward: the future must carry an error itself
            self._in_backward = False

    def _tune(self, tuner: Tuner) -> None:
        """On all ranks before the first bucket of a step, when nothing is under way."""
        try:
            tuner.begin(self.steps)
        except Exception as error:
            self.error = error
            return
        for name in tuner.take_changes():
            self._averager.factors.forget(name)
        for name in tuner.take_plain():
            self._memory.repay(name)
        self._begun = time.perf_counter()

    def _end_backward(self) -> None:
        """Runs before DDP's own callback, which waits for the futures; another, after it, raises the errors.

        So DDP's timers see the waiting, and DDP is through with its step when the error comes. Only where DDP
        itself reduces a map of unused parameters would it trip over a lost peer before we could say so.
        """
        if self.timeline.on:
            self.timeline.backward_ends()
        self._waiting = UnderWay("waiting for communication")
        if self._wait_before_ddp:
            self._settle_all()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._settle_all)

    def _settle_all(self) -> None:
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
        if self.timeline.on:
            self.timeline.close([flight.message for flight in flights], at_end=True)
        if self._tuner is not None:
            sent = [flight.sent for flight in flights]
            buckets = [
                Timed(each.ready - self._begun, each.took, flight.work.wire_bytes)
                for each, flight in zip(sent, flights, strict=True)
            ]
            self._tuner.end(self.steps - 1, time.perf_counter() - self._begun, buckets)
        if self._recorder is not None and self._recorder.step([flight.sent for flight in flights]):
            self._recorder = None

    def _judge(self) -> None:
        """Decide, on what all ranks told each other in the step before; the same on all of them."""
        watch, told = self._watch, self._told
        if watch is None:
            return
        self._told = None
        try:
            if told is not None and told.told is not None:
                told.work.wait()
                watch.judge(self.steps, told.told)
        except Exception as error:
            self.error = self.error or error
        watch.begin(self.steps)
        for name in watch.take_resets():
            self._memory.reset(name)
        for name in watch.take_changes():
            self._averager.factors.forget(name)

    def _launch(self, bucket: GradBucket, buffer: torch.Tensor) -> Flight:
        ranks = dist.get_world_size(self.group)
        packing = self._packings.of(bucket, buffer, self.steps, ranks)
        if self._tuner is not None and self._tuner.wants(self.steps):
            self._tuner.look(bucket.index(), self._packings.names(bucket), bucket.gradients())
        sampled = self.sample_every > 0 and self.steps % self.sample_every == 0
        samples: list[Sample] | None = [] if sampled else None
        handed: list[Handed] = []
        tensors: list[torch.Tensor] = []
        residuals: list[torch.Tensor | None] = []
        for segment, tensor in zip(packing.segments, packing.cut(buffer), strict=True):
            if segment.lossless:
                self._memory.plain(segment, tensor)
                tensors.append(tensor)
                residuals.append(None)
                continue
            norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) if sampled else 0.0
            given = self._memory.hand(segment, tensor, ranks, unused=self._may_leave_unused, sampled=sampled)
            if samples is not None:
                samples.append(Sample.take(segment.name, segment.codec, norm, given.sent, given.residual))
                if self._watch is not None:
                    self._watch.sampled(segment.name, segment.codec)
            handed.append(given)
            tensors.append(given.sent)
            residuals.append(given.residual)
        last, told = bucket.is_last(), None
        own = self._tuner is not None and self._tuner.own  # then nothing is lost, and nobody watches
        if self._watch is not None and last and not own:
            told = self._watch.vector().to(buffer.device)
        if own:
            work: Work = OwnWork(buffer, self.group)
        elif self._sequencer is None or (self._tuner is not None and not self._tuner.in_stages):
            work = self._averager.start(packing, tensors, residuals, told, self.steps)
        else:
            stages = self._averager.stages(packing, tensors, residuals, told, self.steps)
            work = self._sequencer.submit(stages, [buffer], last=last)
        key = mixer.mix_key(self.seed, dist.get_rank(self.group), self.steps)
        flight = Flight(work, packing, buffer, handed, samples, told, key)
        if told is not None:
            self._told = flight
        return flight
