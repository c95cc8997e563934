"""What the DDP hook remembers between steps, and what its user asks it for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, where type checkers find it

from dtcomm.compress.autotune_model import NAME as AUTO
from dtcomm.compress.autotune_model import AutoConfig
from dtcomm.compress.bucket_averager import NONE, BucketAverager
from dtcomm.compress.checkpoint import VERSION, require_matching_sizes, select_share
from dtcomm.compress.error_state import ErrorState
from dtcomm.compress.guard import Event, Guard, count_events
from dtcomm.compress.guard_monitor import make_monitor
from dtcomm.compress.policy import Policy, as_policy
from dtcomm.compress.report import ParameterTotals, Report, rows, total_seconds
from dtcomm.compress.spec import Scheme
from dtcomm.compress.step_recorder import StepRecorder
from dtcomm.ddp.autotune.tuner import Tuner
from dtcomm.ddp.bucket_layouts import BucketLayouts
from dtcomm.ddp.chooser import Chooser, FixedPolicy
from dtcomm.ddp.rank_agreement import ProcessGroupConsensus
from dtcomm.ddp.reducer import Reducer
from dtcomm.profiling import Metric, Timeline

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
    timeline: keep the times of so many last steps, for ``timeline.count_events()`` and `trace`; 0: look at no clock
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
        if spec == AUTO:
            auto = AutoConfig(budget=budget, candidates=candidates, every=check_every)
            self._chooser: Chooser = Tuner(auto, ProcessGroupConsensus(group))
        elif budget is not None or candidates is not None:
            raise ValueError(f"spec: budget and candidates go with {AUTO!r}, got {spec!r}")
        else:
            self._chooser = FixedPolicy(as_policy(spec))
        self.group = group
        self.feedback = feedback
        schemes = self._chooser.schemes
        # Where nothing is lost nothing can be harmful.
        self._watch = make_monitor(guard if any(scheme != NONE for scheme in schemes) else None)
        self._error_state = ErrorState(feedback, residual, schemes)
        self._averager = BucketAverager(algorithm, group, seed)
        self._layouts = BucketLayouts(self._chooser, self._watch, warmup, parameters)
        self.timeline = Timeline("ddp")
        if timeline:
            self.timeline.start(timeline)
        self._reducer = Reducer(
            group,
            self._chooser,
            self._watch,
            self._layouts,
            self._error_state,
            self._averager,
            self.timeline,
            sample_every,
        )

    @property
    def steps(self) -> int:
        """Backward passes that were reduced."""
        return self._reducer.steps

    @property
    def error(self) -> Exception | None:
        """What a collective failed with; after it the model needs a new DDP around it."""
        return self._reducer.error

    @property
    def seed(self) -> int:
        """Of stochastic rounding."""
        return self._averager.seed

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard saw and did, and what "auto" chose, each in order; the same on all ranks."""
        return (*self._watch.events, *self._chooser.decisions)

    def observe(self, loss: float | torch.Tensor) -> None:
        """Tell the guard this step's loss, once a step and before its backward, on every rank."""
        self._watch.observe_loss(loss)

    def report(self) -> Report:
        """What was compressed, with what, and what it saved, up to the last finished backward."""
        events = {
            name: count_events([event for event in self.events if event.name == name])
            for name in {event.name for event in self.events}
        }
        packings = [*self._layouts.retired, *self._layouts.current.values()]
        tallies: dict[str, ParameterTotals] = {}
        memory = self._error_state.nbytes()
        if factors := self._averager.factors.nbytes():
            memory["factors"] = factors
        for packing in packings:
            packing.add_to(tallies)
        return Report(
            policy=str(self._chooser),
            feedback=self.feedback,
            steps=self.steps,
            messages=sum(packing.messages for packing in packings),
            wire_bytes=sum(packing.wire_bytes for packing in packings),
            plain_bytes=round(sum(packing.plain_bytes for packing in packings)),
            seconds=total_seconds(packing.seconds for packing in packings),
            residual_bytes=self._error_state.persistent_bytes(),
            memory=memory,
            events=count_events(self._watch.events),
            auto=tuple(map(str, self._chooser.decisions)),
            plans=tuple(self._chooser.rows),
            rows=rows(tallies.items()),
            buckets=tuple(
                packing.row(index, events) for index, packing in sorted(self._layouts.current.items())
            ),
        )

    def metrics(self) -> list[Metric]:
        """The report's, and the timeline's where one is kept, for `dtcomm.profiling.write_prometheus` and
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
        self._reducer.recorder = StepRecorder(path, steps, ranks, str(self._chooser), first)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by ``factor``: for a loss scale that changed by it between two steps."""
        self._error_state.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, and the counters; every rank saves its own."""
        return {
            "version": VERSION,
            "steps": self.steps,
            "seed": self.seed,
            "rank": dist.get_rank(self.group),
            "world_size": dist.get_world_size(self.group),
            **self._error_state.state_dict(),
            "factors": self._averager.factors.state_dict(),
            "watch": self._watch.state_dict(),
            "auto": self._chooser.state_dict(),
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
        first, residuals = select_share(state, rank, world_size)
        sizes = self._layouts.sizes()
        if sizes is not None:
            require_matching_sizes(residuals, sizes)
        self._error_state.load(state, residuals, rank, world_size)
        self._averager.factors.load_state_dict(first.get("factors", {}))
        self._watch.load_state_dict(first.get("watch", {}))
        # Another number of ranks makes another link of it.
        same = first["world_size"] == world_size
        self._chooser.load_state_dict(first.get("auto", {}) if same else {})
        self._reducer.steps, self._averager.seed = first["steps"], first["seed"]

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging the bucket in place; the future holds its buffer once that is done."""
        return self._reducer.reduce(bucket)
