"""`DDPState`: what the DDP hook keeps between steps, and what its user asks it for.

It makes the `Reducer`, which does the work, and attaches the guard, "auto" and the timeline to it.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self, Unpack

from dtcomm import torch_compat
from dtcomm.arguments import require_factor, shares_options
from dtcomm.collectives.groups import Announcement, GroupOrMesh, process_group_of
from dtcomm.compress import checkpoint
from dtcomm.compress.bucket import NONE, bucket_rows
from dtcomm.compress.feedback import DGC, Feedback, common_momentum
from dtcomm.compress.guard import Event, count_events
from dtcomm.compress.models import require_no_sync_batch_norm
from dtcomm.compress.monitor import Monitor
from dtcomm.compress.payoff import VERIFY, Payoff, unmeasured
from dtcomm.compress.policy import Policy, as_policy, exclusions
from dtcomm.compress.report import Report, describe_uncompressed
from dtcomm.compress.reporting import CopiedState, Reporting, why_unused
from dtcomm.compress.spec import AUTO, Scheme, choose_feedback, parse_scheme, require_kernels
from dtcomm.compress.traffic import ParameterTotals, Row, group_rows, total_seconds
from dtcomm.ddp.auto import BASELINE, SCOPE, ProcessGroupConsensus, Tuner, Verifier
from dtcomm.ddp.layouts import Chooser
from dtcomm.ddp.observers import (
    GuardObserver,
    LossScaleObserver,
    RegistrationObserver,
    TimelineObserver,
    TunerObserver,
    UncompressedObserver,
)
from dtcomm.ddp.options import DEFAULTS, Options, checked
from dtcomm.ddp.reducer import Reducer
from dtcomm.profiling import Timeline
from dtcomm.torch_compat import GradBucket
from dtcomm.tp.sharded_module import shard_groups

_log = logging.getLogger("dtcomm")


def _is_scheme(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(parse_scheme(value))
    except ValueError:
        return False


def _is_loss_scale(value: object) -> bool:
    return value is None or (isinstance(value, float) and 0 < value < math.inf)


_CHECKS = {
    "steps": checkpoint.COUNT,
    "watch": checkpoint.WATCH_CHECK,
    "auto": checkpoint.entries(
        may_be_empty=True, chosen=checkpoint.plain("the spec of a scheme", _is_scheme), bypass=checkpoint.BOOL
    ),
    "loss_scale": checkpoint.plain("a number above 0", _is_loss_scale),
}


@shares_options(DEFAULTS, Options)
class DDPState(Reporting):
    """The state of the hook: the scheme of each parameter, the residuals, and what was counted.

    `dtcomm.ddp.compress` makes it and registers the hook; frameworks that register hooks themselves take
    ``dtcomm.ddp.DDPState("int8")`` and ``dtcomm.ddp.hook``.

    Args:
        group: The process group of the model, or one axis of a device mesh; None is the default group.
        parameters: (name, parameter) pairs, as of ``module.named_parameters()``. Without them a parameter is called
            ``parameter.K``, in the order in which buckets first contain them, which is the same in every process and
            run with the same model and bucket size. They also say over which ranks tensor parallelism cuts the model:
            the guard and "auto" make the same decisions on these.

    Attributes:
        group: The process group.
        feedback: The kind of error feedback.
        timeline: The `dtcomm.profiling.Timeline`.
        detached: Whether `detach` was called.
        successor: The state that the hook registered with this one works for, after `detach` and another `compress`.

    Raises:
        ValueError: An option is out of range, or options exclude each other; the message names it and what is valid.
    """

    integration = "DDP"
    timeline: Timeline

    def __init__(
        self,
        codec: str | Scheme | Policy = "int8",
        group: GroupOrMesh = None,
        feedback: bool | str | Feedback = "auto",
        *,
        parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        **options: Unpack[Options],
    ) -> None:
        options, group = checked(options), process_group_of(group, "dp")
        guard, candidates = options["guard"], options["candidates"]
        grad_scaler, timeline = options["grad_scaler"], options["timeline"]
        named = None if parameters is None else list(parameters)
        excluded = exclusions(options["exclude"], None if named is None else [name for name, _ in named])
        tuner = None
        self._consensus = ProcessGroupConsensus(group)
        if codec == AUTO:
            if options["verify"]:
                raise ValueError(f"verify: {AUTO!r} measures by itself; valid: 0")
            tuner = Tuner(candidates, self._consensus, excluded)
        elif candidates is not None:
            raise ValueError(f"codec: candidates goes with {AUTO!r}, got {str(codec)!r}")
        self._tuner = tuner
        self._verifier: Verifier | None = None
        self._chooser: Chooser = tuner or Chooser(excluded | as_policy(codec))
        if options["verify"] and tuner is None:
            self._chooser = self._verifier = self._make_verifier(excluded | as_policy(codec), options)
        self.arguments = {"codec": codec, "feedback": feedback, **options}
        feedback, self._feedback_reason = choose_feedback(feedback, self._chooser.schemes)
        self._options = {"codec": str(self._chooser), "feedback": str(feedback)}
        self._save_residuals = options["save_residuals"]
        self.group = group
        self.feedback = feedback
        self.successor: DDPState | None = None
        self.detached = False
        self._unused = ""
        self._undo: list[Callable[[], None]] = []
        self._compresses = tuner is None and any(scheme != NONE for scheme in self._chooser.schemes)
        if all(scheme == NONE for scheme in self._chooser.schemes):
            guard = None  # nothing is lost, so nothing can be harmful
        self._monitor = Monitor(guard, group, momentum=common_momentum(self._chooser.schemes))
        self._reducer = Reducer(group, self._chooser, self._monitor, named, feedback, options)
        self._set_agreeing_groups([parameter for _, parameter in named or ()])
        self._earlier_steps = 0  # of the runs before the checkpoint that this one continues from
        self.timeline = Timeline("ddp")
        if timeline:
            self.timeline.start(timeline)
        self._loss_scale: LossScaleObserver | None = None
        if grad_scaler is not None and grad_scaler.is_enabled():
            self._loss_scale = LossScaleObserver(grad_scaler, self._reducer)
            self._reducer.attach(self._loss_scale)
        if guard is not None:
            self._loss_watch = self._monitor
            self._reducer.attach(GuardObserver(self._monitor, self._reducer))
        if tuner is not None:
            self._reducer.attach(TunerObserver(tuner, self._reducer))
        elif self._verifier is not None and self._compresses:
            self._reducer.attach(TunerObserver(self._verifier, self._reducer))
        if self._compresses:
            self._reducer.attach(UncompressedObserver(self._reducer, options["warmup"], group))
        self._reducer.attach(TimelineObserver(self.timeline))

    def _make_verifier(self, policy: Policy, options: Options) -> Verifier:
        verifier = Verifier(policy, options["verify"], options["warmup"], self._consensus)
        if any(isinstance(scheme, DGC) for scheme in verifier.schemes):
            raise ValueError("verify: dgc replaces the optimizer's momentum and cannot come and go; valid: 0")
        return verifier

    def _set_agreeing_groups(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let the guard and "auto" make the same decisions on all ranks of tensor parallelism.

        They have copies of norms and biases. With another codec on each of them the copies would become different.
        """
        groups = {group.group_name: group for own in shard_groups(parameters) for group in own}
        self._monitor.agreeing_groups = self._consensus.agreeing_groups = tuple(groups.values())

    @property
    def steps(self) -> int:
        """The number of backward passes that were reduced."""
        return self._reducer.steps

    @property
    def error(self) -> Exception | None:
        """What a collective failed with; after it the model needs a new DDP around it."""
        return self._reducer.error

    @property
    def seed(self) -> int:
        """The seed of stochastic rounding."""
        return self._reducer.averager.seed

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard found and did, and what "auto" chose, each in order; the same on all ranks."""
        return (*self._monitor.events, *self._chooser.decisions)

    def set_samples(self, samples: int, total: int) -> None:
        """Weight this rank's gradients by its samples; call it on every rank before the backward pass.

        Each rank's gradients are the mean over its own samples, so the average over ranks is that over all samples only
        if every rank has as many. With this the hook returns the sum over ranks of samples / total times the gradient.
        Each rank multiplies its gradients by ranks * samples / total before they are encoded. The sums are those of
        fp32 in rank order, with the same bits on all ranks. It holds until the next call. With gradient accumulation
        count the samples of all micro-batches.

        Args:
            samples: The samples of this rank in the step, at least 1.
            total: The samples of all ranks together, the same on all ranks.
        """
        self._reducer.set_samples(samples, total)

    def retune(self) -> None:
        """Let "auto" choose again, from the next step on: the link or the model has changed. Call it on every rank.

        Raises:
            ValueError: The state was not made with "auto".
        """
        if self._tuner is None:
            raise ValueError(f"codec: retune goes with {AUTO!r}, got {str(self._chooser)!r}")
        self._tuner.retune()

    def report(self) -> Report:
        """Return what was compressed, with what, and what it saved, up to the last backward pass.

        ``state.print_report()`` prints tables on the group's first rank; ``to_dict()`` and ``to_json()`` give the
        values.
        """
        events = {
            name: count_events([event for event in self.events if event.name == name])
            for name in {event.name for event in self.events}
        }
        layouts = self._reducer.layouts
        retired, current = layouts.retired, layouts.current
        if self._verifier is not None and not self._verifier.pairs.compresses:
            retired, current = layouts.under_revision(Verifier.COMPRESSES)
        all_layouts = [*retired, *current.values()]
        totals: dict[str, ParameterTotals] = {}
        memory = self._reducer.error_state.nbytes()
        if factors := self._reducer.averager.factors.nbytes():
            memory["factors"] = factors
        for layout in all_layouts:
            layout.add_to(totals)
        rows = group_rows(totals.items())
        rank, world_size = checkpoint.rank_and_size(self.group)
        return Report(
            rank=rank,
            world_size=world_size,
            policy=str(self._chooser),
            feedback=self.feedback if isinstance(self.feedback, bool | str) else str(self.feedback),
            feedback_reason=self._feedback_reason,
            steps=self.steps - self._earlier_steps,
            earlier_steps=self._earlier_steps,
            messages=sum(layout.messages for layout in all_layouts),
            wire_bytes=sum(layout.wire_bytes for layout in all_layouts),
            plain_bytes=round(sum(layout.plain_bytes for layout in all_layouts)),
            leaving_bytes=self._reducer.averager.leaving_bytes(all_layouts),
            seconds=total_seconds(layout.seconds for layout in all_layouts),
            residual_bytes=self._reducer.error_state.persistent_bytes(),
            memory=memory,
            events=count_events(self._monitor.events),
            fidelity=self._monitor.fidelity,
            auto=tuple(map(str, self._chooser.decisions)),
            plans=tuple(self._chooser.rows),
            rows=rows,
            uncompressed=self._unused or self._why_uncompressed(rows),
            by_message=bucket_rows("gradients", retired, current, totals, events),
            payoff=None if self._unused else self._payoff(),
            unmeasured=unmeasured(None if self._verifier is None else self._verifier.pairs, VERIFY),
        )

    def _why_uncompressed(self, rows: Sequence[Row]) -> str:
        if self.detached:
            return (
                f"nothing is compressed after step {self.steps}: detach() was called; the counters end there"
            )
        return describe_uncompressed(rows) if self._compresses else ""

    def _payoff(self) -> Payoff | None:
        """Return whether compression pays, as "auto" or ``verify`` measured it."""
        if self._verifier is not None:
            return self._verifier.pairs.payoff
        choice = self._chooser.decisions[-1] if self._chooser.decisions else None
        if choice is None or not choice.limit:
            return None
        return Payoff(
            compressed_ms=choice.value * 1e3,
            uncompressed_ms=choice.limit * 1e3,
            scope=SCOPE,
            baseline=BASELINE,
        )

    def trace(self, path: str | os.PathLike[str]) -> str:
        """Write this rank's recorded steps for Perfetto or chrome://tracing; ``dtcomm trace`` merges the ranks' files.

        Args:
            path: ``trace.json`` becomes ``trace.rank0.json``.

        Returns:
            The path of the file.

        Raises:
            ValueError: No step was recorded; give ``timeline=100`` or call ``timeline.start()``.
        """
        return self.timeline.trace(path, checkpoint.rank_and_size(self.group)[0])

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by ``factor``, if the loss scale changed by that factor between two steps.

        With ``grad_scaler`` this happens by itself.

        Raises:
            ValueError: The factor is not above 0, or not finite.
        """
        require_factor(factor)
        self._reducer.error_state.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, and the counters; every rank saves its own.

        In a group with one rank, in which nothing is compressed, the value of ``"unused"`` says so.
        """
        rank, world_size = checkpoint.rank_and_size(self.group)
        return checkpoint.seal(
            {
                "integration": self.integration,
                "steps": self.steps,
                "seed": self.seed,
                "rank": rank,
                "world_size": world_size,
                "unused": self._unused,
                "options": self._options,
                **self._reducer.error_state.state_dict(residuals=self._save_residuals),
                "factors": self._reducer.averager.factors.state_dict(),
                "watch": self._monitor.state_dict(),
                "auto": self._chooser.state_dict(),
                "loss_scale": None if self._loss_scale is None else self._loss_scale.scale,
            }
        )

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continue from a checkpoint.

        Args:
            state: What `state_dict` returned on this rank, or the list of all ranks' states in rank order. From a list
                the number of ranks may change; the sum of the residuals over ranks is kept.
            strict: Refuse a state that was saved with another ``codec`` or ``feedback``; False: load its residuals
                alone.

        Raises:
            ValueError: The state is damaged, an entry is missing or not valid, a single state comes from another number
                of ranks, the parameters are not this model's, or it was saved with other options. Nothing has changed.
        """
        rank, world_size = checkpoint.rank_and_size(self.group)
        reducer = self._reducer
        sizes = reducer.layouts.sizes()
        checks = (
            _CHECKS | reducer.error_state.checks(sizes) | {"factors": reducer.averager.factors.check(sizes)}
        )
        first, residuals = checkpoint.select_share(state, rank, world_size, checks, self.integration)
        same_options = checkpoint.has_options(first, self._options, strict)
        reducer.error_state.load(state, residuals, rank, world_size, residuals_only=not same_options)
        reducer.averager.factors.load_state_dict(first["factors"] if same_options else {})
        self._monitor.load_state_dict(first["watch"])
        if self._loss_scale is not None:
            self._loss_scale.scale = first["loss_scale"]
        # With another number of ranks the link is another one, and "auto" measures again.
        same_job = same_options and first["world_size"] == world_size
        self._chooser.load_state_dict(first["auto"] if same_job else {})
        self._earlier_steps = first["steps"] - (reducer.steps - self._earlier_steps)
        reducer.steps, reducer.averager.seed = first["steps"], first["seed"]

    def register(self, model: DistributedDataParallel, hook: Any) -> None:
        """Register ``hook`` with this state at a DDP model, and let the model's next forward raise `error`.

        Raises:
            RuntimeError: The model has a communication hook already, or is on a GPU and dtcomm has no CUDA kernels.
            ValueError: The model is on a GPU, and a codec has no CUDA kernel.
        """
        hooked = [s for s in torch_compat.ddp_hook_states(model) if not isinstance(s, CopiedState)]
        if any(not isinstance(s, DDPState) or not (s.successor or s).detached for s in hooked):
            raise RuntimeError(
                "model: it has a communication hook already, which torch cannot replace; "
                "wrap the module in a new DistributedDataParallel to compress it differently"
            )
        if dist.get_world_size(model.process_group) == 1:
            self.set_unused(has_hook=True)
        else:
            require_kernels(self._chooser.schemes, model.parameters(), "codec")
            if dist.get_rank(model.process_group) == 0:
                policy = self._chooser if self._tuner is None else as_policy("int8")
                named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
                compressed = sum(p.numel() for name, p in named if policy.choose(name, p).codec != NONE)
                self._reducer.error_state.log_memory("dtcomm.ddp", compressed, self._feedback_reason)
        self._reducer.finish_before_ddp = model.find_unused_parameters
        if model.find_unused_parameters or model.static_graph:
            self._reducer.track_use(model.parameters())
        joining = weakref.ref(model)  # the model has the hook, and with it the reducer

        def divides_by_active() -> bool:
            joined: Any = joining()
            return joined is not None and torch_compat.divides_by_active_ranks(joined)

        self._reducer.divides_by_active = divides_by_active
        if hooked:
            hooked[0].successor = self
        else:
            model.register_comm_hook(self, hook)
        announcement = Announcement(model.process_group, "dtcomm.ddp.compress", self.arguments)
        self._reducer.attach(RegistrationObserver(announcement, self._reducer))

        def raise_error(module: torch.nn.Module, args: Any) -> None:
            if self.error is not None:
                raise self.error
            require_no_sync_batch_norm(module)
            if self._loss_scale is not None:
                self._loss_scale.fetch()

        handle = model.register_forward_pre_hook(torch_compat.ModuleHook(raise_error))
        self._undo = [handle.remove, self.timeline.stop]
        self.timeline.attach(model)

    def detach(self) -> None:
        """Give DDP its uncompressed gradients back; call it between two steps, on every rank.

        torch cannot remove the communication hook of a DDP model, so the hook stays and does what torch's own
        ``allreduce_hook`` does, with the bits of DDP without a hook. All other hooks are removed, and residuals,
        momenta and factors are freed. `set_samples` has no effect any longer. The report keeps what there was.
        `compress` may be called again.

        Example::

            state.detach()
            state = dtcomm.ddp.compress(model, "int4")
        """
        self.detached = True
        while self._undo:
            self._undo.pop()()
        self._reducer.release()

    def set_unused(self, *, has_hook: bool = False) -> Self:
        """Say in the log, the report and the state that this state compresses nothing, and why.

        Args:
            has_hook: Whether the hook is registered nevertheless.
        """
        idle = not has_hook and any(isinstance(scheme, DGC) for scheme in self._chooser.schemes)
        more = ", and the momentum of 'dgc' does not act; give it to the optimizer" if idle else ""
        self._unused = why_unused("dtcomm.ddp", more)
        return self

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a bucket in place; the future holds its buffer once that is done. The hook calls it."""
        return self._reducer.reduce(bucket)
