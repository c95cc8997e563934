"""The state of a sharded model's compression between calls: residuals, references, buffers, counters and guard."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from dtcomm import env, torch_compat
from dtcomm.arguments import require_bool, require_factor, require_int
from dtcomm.codecs import Codec
from dtcomm.collectives.groups import leaving_bytes
from dtcomm.compress import checkpoint
from dtcomm.compress.guard import Event, count_events
from dtcomm.compress.payoff import VERIFY, ForwardPairs, unmeasured
from dtcomm.compress.report import Report, describe_uncompressed
from dtcomm.compress.reporting import Reporting, why_unused
from dtcomm.compress.residuals import FORMS, log_feedback
from dtcomm.compress.traffic import Traffic, group_traffic
from dtcomm.fsdp.guard import ROOT, ShardGuard, parameters_name
from dtcomm.fsdp.options import UNCOMPRESSED, CompressionSpec, Specs, StateOptions
from dtcomm.fsdp.storage import BufferPool, FlatLayout, FullResidual, LoCoResidual
from dtcomm.kernels import counter_rng
from dtcomm.profiling import Timeline
from dtcomm.streams import Streams, record_streams, streams_of

_log = logging.getLogger("dtcomm")

_CHECKS = {
    "calls": checkpoint.COUNT,
    "counts": checkpoint.each(checkpoint.COUNT),
    "guard": checkpoint.entries(may_be_empty=True, steps=checkpoint.COUNT, monitor=checkpoint.WATCH_CHECK),
    "residuals": checkpoint.residuals(),
    "references": checkpoint.each(checkpoint.TENSOR),
}
#: Integration → its name in logs.
LOG_NAMES = {"FSDP": "dtcomm.fsdp", "ShardedOptimizer": "dtcomm.fsdp.ShardedOptimizer"}


class FSDPState(Reporting):
    """The compression state of a model; `dtcomm.fsdp.compress` makes one for all modules of a model.

    Args:
        specs: What gradients and parameters are compressed with.
        options: The other arguments of the call.
        integration: Whose state it is, in the report: ``"FSDP"`` (default) or ``"ShardedOptimizer"``.

    Attributes:
        gradients: Spec of the gradients' reduction.
        parameters: Spec of the parameters' all-gather.
        num_shards: Number of ranks that parameters are cut over. In a two-dimensional mesh that is not the world size.
        shard_index: This rank's position among them.
        num_replicas: Number of replicas of the sharded model.
        replica_index: The position of these ranks among the replicas.
        group: Their process group; None is the default group.
        agreeing_groups: The groups over which parameters are cut before they are sharded, those of tensor parallelism,
            and those of replicas. Their ranks follow the guard's decisions together.
        steps_ahead: Steps that begin before there is anything to communicate: 1 where the end of a step begins the
            next one.
        save_residuals: Whether `state_dict` has the residuals.
        buffers: The buffers of collectives; ``buffers.trim()`` frees those that are not in use.
        timeline: Recorder of training steps (`dtcomm.profiling`).
        warming_up: Whether gradients are sent uncompressed, at the start of a run.
    """

    timeline: Timeline

    def __init__(self, specs: Specs, options: StateOptions, integration: str = "FSDP") -> None:
        require_int("seed", options["seed"])
        require_int("verify", options["verify"], 0)
        require_bool("save_residuals", options["save_residuals"])
        self.gradients, self.parameters, self._feedback_reason = specs
        self.arguments = {**options, "gradients": str(self.gradients), "parameters": str(self.parameters)}
        self.integration, self.steps_ahead = integration, int(integration == "ShardedOptimizer")
        self.seed, self.save_residuals = options["seed"], options["save_residuals"]
        self.algorithm = "auto"  # of the collectives over the shards
        self.calls = 0
        self.shard_index, self.num_shards = checkpoint.rank_and_size()
        self.replica_index, self.num_replicas = 0, 1
        self.agreeing_groups: list[dist.ProcessGroup] = []
        self.group: dist.ProcessGroup | None = None
        self.buffers = BufferPool()
        self.references: dict[str, torch.Tensor] = {}
        # On devices: the event after the kernels that wrote a reference.
        self._reference_events: dict[str, tuple[Streams, Any]] = {}
        self._saved_reference_shards: dict[str, torch.Tensor] = {}  # from a checkpoint, until first used
        self._layouts: dict[str, FlatLayout | None] = {}
        self._residuals = _make_residual_store(self.gradients.prefix, options["residual"])
        self._modules: dict[str, dict[str, Traffic]] = {}  # module -> kind of collective -> counters
        self._notes: list[str] = []
        self._disabled = env.disabled()
        self._unused = ""  # why nothing is compressed in this job, or empty
        self._earlier_steps = 0  # of the runs before the checkpoint that this one continues from
        self.timeline = Timeline("fsdp")
        self.guard = ShardGuard(options["guard"], options["sample_every"])
        self._loss_watch = None if options["guard"] is None else self.guard
        self._excluded: dict[str, str] = {}  # module -> the pattern that excludes it
        self._undo: list[Callable[[], None]] = []
        # What was asked for and is not compressed is logged once, by the first rank, at the end of a pass.
        self.warming_up = False
        scope = "a step" if self.steps_ahead else "a step from forward to forward"
        groups = lambda: (self.group, *self.agreeing_groups)  # noqa: E731
        self._pairs = ForwardPairs(options["verify"], scope, groups) if options["verify"] else None
        self._has_begun = self._has_fallback = self._logged = self._log_is_queued = False
        self._has_reduced = False  # gradients, in this step

    # --- for users --------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return what was sent, by codec and by module, and why something was not compressed."""
        if self.buffers.unshared_reason:
            self.add_note(self.buffers.unshared_reason)
        traffic = self._traffic()
        residual_bytes = 0 if self._residuals is None else self._residuals.nbytes()
        report = Report.of_traffic(
            traffic,
            self._events_by_message(),
            integration=self.integration,
            rank=self.rank,
            world_size=self.num_replicas * self.num_shards,
            policy=f"gradients {self.gradients}, parameters {self.parameters}",
            feedback=self.gradients.prefix or False,
            feedback_reason=self._feedback_reason,
            steps=max(0, self._steps()),
            earlier_steps=self._earlier_steps,
            leaving_bytes=self._leaving_bytes(),
            residual_bytes=residual_bytes,
            memory={
                "residuals": residual_bytes,
                "references": sum(reference.nbytes for reference in self.references.values()),
                "shared buffers": self.buffers.nbytes(),
            },
            modules={
                name: {
                    kind: replace(counters, relative_error=counters.fetch_error())
                    for kind, counters in kinds.items()
                }
                for name, kinds in self._modules.items()
            },
            events=count_events(self.events),
            fidelity=self.guard.fidelity,
            notes=tuple(self._notes),
            uncompressed=self._unused or self._uncompressed(),
            payoff=None if self._pairs is None else self._pairs.payoff,
            unmeasured=unmeasured(self._pairs, VERIFY),
        )
        self.log_uncompressed()
        return report

    @property
    def rank(self) -> int:
        """The position of this rank among all shards of all replicas, which is its rank in the report."""
        return self.replica_index * self.num_shards + self.shard_index

    def _steps(self) -> int:
        """Return the number of steps of this run."""
        return self.guard.steps - self._earlier_steps - self.steps_ahead

    def _leaving_bytes(self) -> int | None:
        """Return the bytes that left this rank's host; None also where there are replicas of the shards."""
        if not dist.is_initialized() or dist.get_world_size(self.group) != self.num_shards:
            return None
        collectives = {
            "gradients": ("reduce_scatter", self.gradients),
            "parameters": ("all_gather", self.parameters),
        }
        left = 0
        for _, counters in self._traffic():
            if not counters.wire_bytes:
                continue
            if counters.what not in collectives or not counters.dtype:
                return None
            collective, spec = collectives[counters.what]
            tensor = counters.numel, getattr(torch, counters.dtype), spec.codec_spec
            sent = leaving_bytes(counters.wire_bytes, collective, *tensor, self.algorithm, self.group)
            if sent is None:
                return None
            left += sent
        return left

    def _traffic(self) -> list[tuple[str, Traffic]]:
        """Return the counters of all collectives, each with the name of its module."""
        for name, kinds in self._modules.items():
            if (layout := self._layouts.get(name)) is not None:
                for counters in kinds.values():
                    counters.tensors = len(layout.parameters)
        return [
            (name or ROOT, counters) for name, kinds in self._modules.items() for counters in kinds.values()
        ]

    def _uncompressed(self) -> str:
        unit = "modules" if self.integration == "FSDP" else "buckets"
        return describe_uncompressed(group_traffic(self._traffic()), unit)

    def _events_by_message(self) -> dict[tuple[str, str], dict[str, int]]:
        """Return the counts of the guard's events by module and kind of collective."""
        names = {
            (name or ROOT, kind): parameters_name(name) if kind == "parameters" else name or ROOT
            for name, kinds in self._modules.items()
            for kind in kinds
        }
        return {
            key: count_events([event for event in self.events if event.name == name])
            for key, name in names.items()
        }

    def trace(self, path: str | os.PathLike[str]) -> str:
        """Write this rank's recorded steps as a trace for Perfetto, after ``timeline.start()``.

        See `dtcomm.ddp.DDPState.trace`.
        """
        return self.timeline.trace(path, checkpoint.rank_and_size()[0])

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard detected and did, in order."""
        return self.guard.events

    def detach(self) -> None:
        """Give the model its own, uncompressed collectives back; call it between two steps, on every rank.

        The model may be compressed again afterwards. The report keeps what there was; residuals, references of
        ``delta:`` and shared buffers are freed.

        Example::

            state.detach()
            state = dtcomm.fsdp.compress(model, gradients="int4")
        """
        while self._undo:
            self._undo.pop()()
        self.timeline.stop()
        self.resync()
        self.buffers.trim()
        self._disabled, self._residuals = True, None

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by ``factor``, for a loss scale that changed by this factor between two steps."""
        require_factor(factor)
        if self._residuals is not None:
            self._residuals.scale(factor)

    def resync(self) -> None:
        """Send whole parameters in the next gather instead of differences (``delta:``).

        Call it after parameters were changed by anything but the optimizer. Loading a state_dict into the model does it
        automatically.
        """
        self.invalidate_references()
        self._saved_reference_shards.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, its shards of the references, the guard and the counters.

        The state consists of plain values and CPU tensors, which torch.load reads with its defaults. Every rank saves
        its own. In a job with one process, in which nothing is compressed, the value of ``"unused"`` says so.
        """
        residuals: dict[str, torch.Tensor] = {}
        store = self._residuals if self.save_residuals else None
        flat_residuals = {} if store is None else store.state_dict()
        for module, flat in flat_residuals.items():
            layout = self._layouts.get(module)
            if layout is not None and layout.numel(self.num_shards) == flat.numel():
                residuals |= layout.split(flat, self.num_shards)
            else:
                residuals[f"[{module}]"] = flat
        rank, ranks = checkpoint.rank_and_size()
        return checkpoint.seal(
            {
                "integration": self.integration,
                "calls": self.calls,
                "seed": self.seed,
                "rank": rank,
                "world_size": ranks,
                "unused": self._unused,
                "options": self._options(),
                "guard": self.guard.state_dict(),
                "counts": {} if self._residuals is None else dict(self._residuals.counts),
                "residuals": residuals,
                "references": self._saved_reference_shards
                | {
                    name: reference.view(self.num_shards, -1)[self.shard_index].detach().to("cpu", copy=True)
                    for name, reference in self.references.items()
                },
            }
        )

    def _options(self) -> dict[str, str]:
        """Return what must be equal where a state is saved and where it is loaded."""
        return {
            "gradients": str(self.gradients.codec_spec),
            "parameters": str(self.parameters),
            "feedback": self.gradients.prefix or "none",
        }

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continue from a state that `state_dict` returned.

        Args:
            state: This rank's own state, or the states of all ranks of the saved run in rank order. With those the
                number of ranks may have changed: residuals keep their sum over the ranks, and ``delta:`` starts with
                whole parameters.
            strict: Refuse a state that was saved with other codecs or another kind of feedback; False: load its
                residuals alone, if feedback is of the same kind.

        Raises:
            ValueError: The state is damaged, an entry is missing or not valid, a single state comes from a run with
                another number of ranks, or the state was saved with other options. Nothing has changed.
        """
        rank, ranks = checkpoint.rank_and_size()
        first, residuals = checkpoint.select_share(state, rank, ranks, _CHECKS, self.integration)
        same_options = checkpoint.has_options(first, self._options(), strict)
        same_ranks = first["world_size"] == ranks
        flat_residuals: dict[str, torch.Tensor] = {}
        for module, layout in self._layouts.items():
            if layout and all(parameter.name in residuals for parameter in layout.parameters):
                flat_residuals[module] = layout.join(residuals, self.num_shards)
        if same_ranks:
            flat_residuals |= {name[1:-1]: flat for name, flat in residuals.items() if name.startswith("[")}
        self.calls, self.seed = first["calls"], first["seed"]
        steps = self.guard.steps - self._earlier_steps
        self.guard.load_state_dict(first["guard"])
        self._earlier_steps = max(0, self.guard.steps - steps)
        self.resync()
        if same_ranks and same_options:
            own_state = state if isinstance(state, Mapping) else state[rank]
            self._saved_reference_shards = dict(own_state["references"])
        same_feedback = first["options"].get("feedback") == self._options()["feedback"]
        if self._residuals is not None and same_feedback:
            self._residuals.load_state_dict(flat_residuals)
            self._residuals.counts = dict(first["counts"])

    # --- for `compress` ---------------------------------------------------------------------------------------

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Let `detach` call ``undo``."""
        self._undo.append(undo)

    def set_unused(self) -> Self:
        """Say in the log, the report and the state that this state compresses nothing, and why."""
        self._unused = why_unused("dtcomm.fsdp")
        return self

    def exclude(self, module: str, pattern: str) -> None:
        """Send a module uncompressed, because its name matches ``pattern``."""
        self._excluded[module] = pattern

    def exclude_with(self, module: str, part: str) -> None:
        """Send a part of a module uncompressed if the module is excluded."""
        if module in self._excluded:
            self._excluded[part] = self._excluded[module]

    def add_fallback(self, module: str, reason: str) -> None:
        """Report that torch communicates what was to be compressed of a module, and log it after the first pass."""
        for kind, spec in (("parameters", self.parameters), ("gradients", self.gradients)):
            if not spec.is_none and module not in self._excluded:
                traffic = self.traffic(module, kind, UNCOMPRESSED)
                traffic.reason, traffic.fallback = reason, True
                self._has_fallback = True

    # --- for the collectives ----------------------------------------------------------------------------------

    def spec(self, module: str, requested: CompressionSpec) -> CompressionSpec:
        """Return the spec of a module's collective: ``requested``, or none if the module is excluded or warms up."""
        warming_up = self.warming_up and requested is self.gradients
        warming_up |= self._pairs is not None and not self._pairs.compresses
        return UNCOMPRESSED if warming_up or module in self._excluded or self._disabled else requested

    def note_choice(self, module: str, traffic: Traffic) -> None:
        """Complete the reason in ``traffic`` for a module's codec, and log it at the end of the pass if it must be."""
        if module in self._excluded:
            traffic.reason = f"exclude: {self._excluded[module]}"
        self._has_fallback |= traffic.fallback
        running_backward = torch_compat.backward_pass() != -1
        # `ShardedOptimizer` gathers parameters after backward; its next step begins, and logs, after that.
        if self.integration != "FSDP":
            return
        if self._has_fallback and running_backward and not (self._logged or self._log_is_queued):
            # Only at the end of backward it is known what all modules did.
            self._log_is_queued = True
            torch_compat.after_backward(self.log_uncompressed)

    def log_uncompressed(self) -> None:
        """Log, once, what was asked for and is not compressed."""
        if self._has_fallback and not self._logged:
            self._logged = True
            self.warn(f"{self._uncompressed()}; see state.report()")

    def warn(self, text: str) -> None:
        """Log a line on the first rank, because all ranks find the same."""
        if self.rank == 0:
            _log.warning("%s: %s", LOG_NAMES[self.integration], text)

    def log_feedback(self, memory: str) -> None:
        """Log the memory of error feedback on each rank, as text, and why it is on or off if "auto" decided."""
        if self.rank == 0:
            memory = memory if self.gradients.prefix else ""
            log_feedback(LOG_NAMES[self.integration], memory, self._feedback_reason)

    def begin_forward(self) -> None:
        """Begin a step in its first forward pass: the first one after gradients were reduced.

        With accumulated gradients or micro-batches of a pipeline a step has several. Were each counted, those in which
        errors are measured might never be those in which gradients are sent.
        """
        if self._has_reduced or not self._has_begun:
            self.begin_step()

    def agree_over(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Add groups to `agreeing_groups`."""
        known = {group.group_name for group in self.agreeing_groups}
        for group in groups:
            if group.group_name not in known and group.size() > 1:
                known.add(group.group_name)
                self.agreeing_groups.append(group)

    def note_reduction(self) -> None:
        """Note that gradients are reduced in this step."""
        self._has_reduced = True

    def begin_step(self) -> None:
        """Begin a training step: apply the guard's decisions."""
        if self._has_begun:  # the pass before this one is complete
            self.log_uncompressed()
        self._has_begun, self._has_reduced = True, False
        if self._pairs is not None and self.guard.steps >= self.steps_ahead and not self.warming_up:
            if dist.get_world_size(self.group) > 1:
                self._pairs.begin()
        for module in self.guard.begin_step(self.group, self.agreeing_groups):
            if self._residuals is not None:
                self._residuals.reset(module)

    def add_note(self, text: str) -> None:
        """Add a line to the report, once: what torch communicates itself, or what is not possible."""
        if text not in self._notes:
            self._notes.append(text)

    def traffic(self, module: str, kind: str, spec: CompressionSpec) -> Traffic:
        """Return the counters of a module's collectives of this kind (``"parameters"``, ``"gradients"``)."""
        return self._modules.setdefault(module, {}).setdefault(kind, Traffic(codec=str(spec), what=kind))

    def register_layout(self, module: str, layout: FlatLayout | None) -> None:
        """Set the layout of a module's flat gradient."""
        self._layouts[module] = layout

    def next_seed(self) -> int:
        """Return a seed for stochastic rounding; ranks call the same collectives, so it is the same on all ranks."""
        self.calls += 1
        return self.seed + self.calls

    def take_residual(self, module: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the fp32 residual of a module's gradient, or None without error feedback."""
        if self._residuals is None:
            return None
        return self._residuals.take(self._residual_key(module, gradient), gradient)

    def put_residual(self, module: str, residual: torch.Tensor | None) -> None:
        """Store the residual from `take_residual` after the collective has updated it."""
        if self._residuals is not None and residual is not None:
            # Not the rank of the job: ranks of tensor parallelism store equal residuals with equal bits.
            key = counter_rng.mix_key(self.seed, self.rank, 0)
            self._residuals.give_back(self._residual_key(module, residual), residual, key)

    def _residual_key(self, module: str, gradient: torch.Tensor) -> str:
        """Return the residual's name; a flat gradient of other size (unused parameters) has its own residual."""
        layout = self._layouts.get(module)
        if layout is None or layout.numel(self.num_shards) == gradient.numel():
            return module
        return f"{module} [{gradient.numel()}]"

    def get_reference(self, module: str) -> torch.Tensor | None:
        """Return the parameters that the peers have, for use on the current stream; None if there are none yet."""
        if module in self._reference_events:
            streams, event = self._reference_events[module]
            streams.wait(event)
        record_streams(self.references.get(module))
        return self.references.get(module)

    def put_reference(self, module: str, reference: torch.Tensor) -> None:
        """Store a reference that was written on the current stream."""
        self.references[module] = reference
        if not reference.is_cpu:
            streams = self._reference_events.get(module, (streams_of(reference.device), None))[0]
            self._reference_events[module] = streams, streams.record()

    def invalidate_references(self) -> None:
        """Drop the references, because a state_dict was loaded into the model.

        References that were loaded from a checkpoint stay: the next differences are taken to them.
        """
        self.references.clear()
        self._reference_events.clear()

    def pop_saved_reference_shard(self, module: str) -> torch.Tensor | None:
        """Return this rank's shard of the reference in the checkpoint, once."""
        return self._saved_reference_shards.pop(module, None)


def _make_residual_store(prefix: str, form: str) -> FullResidual | None:
    """Return the store for a spec's prefix; ValueError if the form of residuals is unknown or not applicable."""
    if form not in FORMS:
        raise ValueError(f"residual: {form!r}; valid: {', '.join(FORMS)}")
    if prefix == "ef":
        return FullResidual(form)
    if form != "fp32":
        reason = (
            f"'{prefix}:' has its own form"
            if prefix
            else "these gradients keep no residuals; feedback=True keeps some"
        )
        raise ValueError(
            f"residual: {form!r} applies to gradients with 'ef:' or feedback=True only; {reason}"
        )
    return LoCoResidual() if prefix == "loco" else None


def codec_spec_for(
    spec: CompressionSpec, dtype: torch.dtype, traffic: Traffic, numel: int, shards: int
) -> str | Codec:
    """Return the codecs of ``spec``, or ``none`` if they cannot compress a tensor; ``traffic`` says which, and why.

    ``numel`` elements are encoded together: those of a shard.
    """
    traffic.dtype, traffic.numel = str(dtype).removeprefix("torch."), numel * shards
    traffic.reason = spec.obstacle(dtype, numel)
    traffic.fallback = bool(traffic.reason)
    traffic.codec = "none" if traffic.fallback else str(spec)
    return UNCOMPRESSED.codec_spec if traffic.fallback else spec.codec_spec
