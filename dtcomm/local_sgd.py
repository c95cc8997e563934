"""Local SGD and DiLoCo: every rank trains on its own, and every so many steps the ranks average their progress.

- Local SGD: Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767).
- Post-local SGD, with synchronous steps at first: Lin, Stich, Patel, Jaggi 2020 (arXiv:1808.07217).
- DiLoCo, with an outer optimizer: Douillard et al. 2023 (arXiv:2311.08105).

The ranks send the differences to the weights that all of them had after the last average. These are small and compress
well; what compression loses is fed back, as for gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtcomm.arguments import require_int
from dtcomm.collectives import Algorithm, Work, broadcast
from dtcomm.compress.bucket_averager import NONE, BucketAverager
from dtcomm.compress.bucket_layout import BucketLayout, build_layout
from dtcomm.compress.checkpoint import VERSION, has_options, require_matching_sizes, select_share
from dtcomm.compress.dgc import DGC
from dtcomm.compress.error_state import ErrorState, PendingGradient
from dtcomm.compress.feedback import Feedback
from dtcomm.compress.guard import Event, Guard, count_events
from dtcomm.compress.guard_monitor import ErrorSample, GradientMeasurement, l2_norm, make_monitor
from dtcomm.compress.payoff import predict_payoff
from dtcomm.compress.policy import SINGLE_RANK, CodecChoice, Policy, as_policy, exclusions
from dtcomm.compress.report import Report, Reporting, describe_uncompressed
from dtcomm.compress.spec import Scheme
from dtcomm.compress.traffic import ParameterTotals, group_rows, total_seconds
from dtcomm.kernels import counter_rng

_log = logging.getLogger("dtcomm")

OuterOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
DEFAULT_GUARD = Guard()
WHAT = "differences of weights"  # what the ranks average, in reports


@dataclass
class _PendingBucket:
    """A bucket while it is averaged.

    Attributes:
        layout: Its segments.
        stages: The remaining stages of its average.
        buffer: The differences, which become their mean.
        pending: Its lossy segments.
        samples: Samples of them, in averages in which errors are measured.
        measurement: What the guard measured of this rank's differences.
    """

    layout: BucketLayout
    stages: Iterator[Work]
    buffer: torch.Tensor
    pending: list[PendingGradient]
    samples: list[ErrorSample]
    measurement: GradientMeasurement | None


class LocalSGD(Reporting):
    """Keeps the replicas of a model together by averaging weights; call `step` after each optimizer step.

    All ranks start with rank 0's weights. Frozen parameters stay as they are; floating-point buffers (running means)
    are averaged uncompressed. Each rank keeps an fp32 copy of the common weights beside the model's own.

    Args:
        model: The model, not wrapped in DDP.
        every: The number of steps between two averages. Default 16.
        spec: What the differences are compressed with, as for `dtcomm.ddp.compress`, but neither "auto" nor dgc.
            Default "int8".
        group: The process group; None is the default group.
        feedback: Error feedback, as for `dtcomm.ddp.compress`. Default True.
        residual: How residuals are kept: "fp32", "bf16" or "int8". Default "fp32".
        outer: Makes the outer optimizer, which takes the averaged difference as the gradient, such as DiLoCo's
            ``lambda weights: torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)``. Default None: the
            weights are averaged.
        warmup: The number of steps at the start after each of which the weights are averaged. Default 0.
        algorithm: The algorithm of the all-reduce, as `dtcomm.all_reduce` takes it. Default "direct".
        seed: The seed of stochastic rounding. Default 0.
        exclude: Shell patterns of parameters, or of modules with all that they contain, that travel uncompressed.
            Default: none.
        bucket_bytes: The size of one message; the messages are in flight side by side. Default 25 MiB.
        guard: Limits beyond which compression counts as harmful; its steps are averages. None: no guard. Default
            ``Guard()``.
        sample_every: Measure errors in every average that this divides; 0: never. Default 10.

    Attributes:
        policy: The policy.
        steps: The number of steps.
        syncs: The number of averages.

    Raises:
        TypeError: ``model`` is not a module, or a DistributedDataParallel.
        ValueError: An option is out of range, or no parameter requires gradients.

    Example::

        local = LocalSGD(model, every=16, spec="int8")
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        every: int = 16,
        spec: str | Scheme | Policy = "int8",
        group: dist.ProcessGroup | None = None,
        feedback: bool | str | Feedback = True,
        *,
        residual: str = "fp32",
        outer: OuterOptimizer | None = None,
        warmup: int = 0,
        algorithm: Algorithm = "direct",
        seed: int = 0,
        exclude: str | Sequence[str] = (),
        bucket_bytes: int = 25 * 2**20,
        guard: Guard | None = DEFAULT_GUARD,
        sample_every: int = 10,
    ) -> None:
        if isinstance(model, DistributedDataParallel) or not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"model: expected a module that nothing else synchronises, got {type(model).__name__}"
            )
        for name, value, least in (
            ("every", every, 1),
            ("warmup", warmup, 0),
            ("seed", seed, None),
            ("bucket_bytes", bucket_bytes, 1),
            ("sample_every", sample_every, 0),
        ):
            require_int(name, value, least)
        if not isinstance(guard, Guard | None):
            raise TypeError(f"guard: expected a dtcomm.ddp.Guard or None, got {type(guard).__name__}")
        excluded = exclusions(exclude, [name for name, _ in model.named_parameters()])
        self.policy = (excluded | as_policy(spec)).for_model(model)
        schemes = [rule.codec for rule in self.policy.rules]
        if any(isinstance(scheme, DGC) for scheme in schemes):
            raise ValueError("spec: dgc has a momentum for gradients; here momentum is the outer optimizer's")
        self._options = {"spec": str(self.policy), "feedback": str(feedback)}
        self.every, self.warmup, self.group = every, warmup, group
        self.steps = self.syncs = 0
        self._earlier_steps = 0  # of the runs before the checkpoint that this one continues from
        self._error_state = ErrorState(feedback, residual, schemes)
        self._averager = BucketAverager(algorithm, group, seed, schemes)
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._weights:
            raise ValueError("model: has no parameters that require gradients")
        self._float_buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        root = 0 if group is None else dist.get_global_rank(group, 0)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                contiguous = tensor.contiguous()
                broadcast(contiguous, root, group=group)
                tensor.copy_(contiguous)
        self._common = [weight.detach().float().clone() for weight in self._weights.values()]
        self._outer = None if outer is None else outer(self._common)
        self._compresses = any(scheme != NONE for scheme in schemes)
        self._monitor = make_monitor(guard if self._compresses else None, group)
        self._sample_every, self._bucket_bytes = sample_every, bucket_bytes
        self._retired: list[BucketLayout] = []
        self._buckets: list[tuple[list[str], BucketLayout]] = []
        self._update_layouts()
        if self._compresses and dist.get_world_size(group) > 1 and dist.get_rank(group) == 0:
            if text := self.report().uncompressed:
                _log.warning("dtcomm.LocalSGD: %s", text)

    def step(self) -> bool:
        """Count a step of this rank, and average if it is time; return whether the ranks averaged."""
        self.steps += 1
        due = self.steps <= self.warmup or (self.steps - self.warmup) % self.every == 0
        if due:
            self.sync()
        return due

    @torch.no_grad()
    def sync(self) -> None:
        """Average now, on all ranks at the same time, for instance before a checkpoint; the host waits for the mean.

        Raises:
            FloatingPointError: A rank sent NaN or Inf. It is raised on every rank, and all of them have the weights of
                the last average.
        """
        self._monitor.begin_step(self.syncs)
        self._update_layouts()
        stats = self._monitor.stats_tensor(self._common[0].device)
        last = len(self._buckets) - 1
        buckets = [
            self._prepare(names, layout, stats if index == last else None)
            for index, (names, layout) in enumerate(self._buckets)
        ]
        _run_stages(buckets)
        self.syncs += 1
        key = counter_rng.mix_key(self._averager.seed, dist.get_rank(self.group), self.syncs)
        for bucket in buckets:
            self._finish(bucket, key)
        if stats is not None:
            self._monitor.evaluate(self.syncs, stats)
        for name in self._monitor.pop_resets():
            self._error_state.reset(name)
        for name in self._monitor.pop_changes():
            self._averager.factors.forget(name)
        means = [bucket.buffer for bucket in buckets]
        finite = all(bool(torch.isfinite(mean).all()) for mean in means)
        if finite:
            self._update_common(means)
        for weight, common in zip(self._weights.values(), self._common, strict=True):
            weight.copy_(common)
        if not finite:
            raise FloatingPointError(
                f"average {self.syncs}, after {self.steps} steps: a rank sent NaN or Inf; "
                "all ranks have the weights of the average before"
            )

    def report(self) -> Report:
        """Return what was sent and saved, compared with uncompressed averages at the same steps."""
        totals: dict[str, ParameterTotals] = {}
        layouts = [*self._retired, *(layout for _, layout in self._buckets)]
        for layout in layouts:
            layout.add_to(totals)
        rows = group_rows(totals.items(), WHAT)
        current = [layout for _, layout in self._buckets]
        return Report(
            integration="LocalSGD",
            rank=dist.get_rank(self.group),
            world_size=dist.get_world_size(self.group),
            policy=f"every {self.every} steps: {self.policy}",
            feedback=self._error_state.kind,
            steps=self.steps - self._earlier_steps,
            earlier_steps=self._earlier_steps,
            messages=sum(layout.messages for layout in layouts),
            wire_bytes=sum(layout.wire_bytes for layout in layouts),
            plain_bytes=round(sum(layout.plain_bytes for layout in layouts)),
            seconds=total_seconds(layout.seconds for layout in layouts),
            residual_bytes=self._error_state.persistent_bytes(),
            memory={
                **self._error_state.nbytes(),
                "common weights": sum(4 * common.numel() for common in self._common),
            },
            events=count_events(self.events),
            fidelity=self._monitor.fidelity,
            rows=rows,
            by_message=tuple(layout.row(f"bucket {index}", WHAT, {}) for index, layout in enumerate(current)),
            uncompressed=describe_uncompressed(rows) if self._compresses else "",
            payoff=predict_payoff(current, self.group, "an average") if self._compresses else None,
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard found and did, in order; the same on all ranks. Its steps are averages."""
        return tuple(self._monitor.events)

    def observe(self, loss: float | torch.Tensor) -> None:
        """Tell the guard this step's loss, on every rank; the last one before an average counts."""
        self._monitor.observe_loss(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state.

        Every rank saves its own, and its model's weights: between averages they differ.
        """
        return {
            "version": VERSION,
            "steps": self.steps,
            "syncs": self.syncs,
            "seed": self._averager.seed,
            "rank": dist.get_rank(self.group),
            "world_size": dist.get_world_size(self.group),
            "options": self._options,
            **self._error_state.state_dict(),
            "factors": self._averager.factors.state_dict(),
            "watch": self._monitor.state_dict(),
            "common": {
                name: common.clone() for name, common in zip(self._weights, self._common, strict=True)
            },
            "outer": {} if self._outer is None else self._outer.state_dict(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continue from a checkpoint.

        Args:
            state: What `state_dict` returned on this rank, or, if the number of ranks has changed, the list of all
                ranks' states in rank order.
            strict: Refuse a state that was saved with another ``spec`` or ``feedback``; False: of the compression load
                its residuals alone.

        Raises:
            ValueError: A single state comes from another number of ranks, the parameters are not this model's, or it
                was saved with other options.
        """
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        first, residuals = select_share(state, rank, world_size)
        sizes = {name: weight.numel() for name, weight in self._weights.items()}
        require_matching_sizes(residuals, sizes)
        require_matching_sizes({name: common.flatten() for name, common in first["common"].items()}, sizes)
        same_options = has_options(first, self._options, strict)
        self._error_state.load(state, residuals, rank, world_size, residuals_only=not same_options)
        self._averager.factors.load_state_dict(first["factors"] if same_options else {})
        self._monitor.load_state_dict(first.get("watch", {}))
        self._earlier_steps = first["steps"] - (self.steps - self._earlier_steps)
        self._averager.seed, self.steps, self.syncs = first["seed"], first["steps"], first["syncs"]
        for name, common in zip(self._weights, self._common, strict=True):
            common.copy_(first["common"][name])
        if self._outer is not None:
            self._outer.load_state_dict(first["outer"])

    def _prepare(
        self, names: Sequence[str], layout: BucketLayout, stats: torch.Tensor | None
    ) -> _PendingBucket:
        """Return a bucket with error feedback applied; none of its stages has begun."""
        buffer, ranks = self._differences(names), dist.get_world_size(self.group)
        sampled = self._sample_every > 0 and self.syncs % self._sample_every == 0
        measurement = self._monitor.measure_gradient(layout, buffer)
        samples: list[ErrorSample] = []
        tensors: list[torch.Tensor] = []
        residuals: list[torch.Tensor | None] = []
        pending: list[PendingGradient] = []
        for segment, tensor in zip(layout.segments, layout.split(buffer), strict=True):
            if segment.lossless:
                tensors.append(tensor)
                residuals.append(None)
                continue
            norm = l2_norm(tensor) if sampled else 0.0
            prepared = self._error_state.prepare(segment, tensor, ranks, sampled=sampled)
            if sampled:
                samples.append(
                    ErrorSample.take(segment.name, segment.codec, norm, prepared.sent, prepared.residual)
                )
                self._monitor.register_sample(segment.name, segment.codec)
            pending.append(prepared)
            tensors.append(prepared.sent)
            residuals.append(prepared.residual)
        layout.messages += 1
        stages = self._averager.stages(layout, tensors, residuals, stats, self.syncs)
        return _PendingBucket(layout, stages, buffer, pending, samples, measurement)

    def _finish(self, bucket: _PendingBucket, key: int) -> None:
        """Record what was lost of a bucket, and store its residuals."""
        residuals = {pending.segment.name: pending.residual for pending in bucket.pending}
        for sample in bucket.samples:
            if (residual := residuals[sample.name]) is not None:
                self._monitor.record_error(sample, residual)
        self._monitor.record_mean(bucket.measurement, bucket.layout, bucket.buffer)
        for pending in bucket.pending:
            self._error_state.finish(pending, key)

    def _differences(self, names: Sequence[str]) -> torch.Tensor:
        """Return common - own of the weights, and the values of the buffers, as one fp32 tensor."""
        common = dict(zip(self._weights, self._common, strict=True))
        return torch.cat(
            [
                (common[name] - self._weights[name] if name in common else self._float_buffers[name])
                .flatten()
                .float()
                for name in names
            ]
        )

    def _update_common(self, means: Iterable[torch.Tensor]) -> None:
        """Move the common weights by the averaged differences, and set the buffers."""
        common = dict(zip(self._weights, self._common, strict=True))
        for (names, _), buffer in zip(self._buckets, means, strict=True):
            targets = [common[name] if name in common else self._float_buffers[name] for name in names]
            parts = torch.split(buffer, [target.numel() for target in targets])
            for name, target, part in zip(names, targets, parts, strict=True):
                if name not in common:
                    target.copy_(part.view_as(target))
                elif self._outer is None:
                    target.sub_(part.view_as(target))
                else:
                    target.grad = part.view_as(target)
        if self._outer is not None:
            self._outer.step()
            self._outer.zero_grad()

    def _update_layouts(self) -> None:
        """Build the layouts, if there are none or the guard has changed the scheme of a weight."""
        revision = self._monitor.revision
        if self._buckets and all(layout.revision == revision for _, layout in self._buckets):
            return
        self._retired += [layout for _, layout in self._buckets]
        self._buckets = list(self._build_layouts(self._bucket_bytes))
        for _, layout in self._buckets:
            layout.revision = revision
            layout.level_shares = self._averager.level_shares(self._common[0])

    def _build_layouts(self, bucket_bytes: int) -> Iterator[tuple[list[str], BucketLayout]]:
        """Yield the names and the layout of every bucket, weights first."""

        def choose(name: str, tensor: torch.Tensor) -> CodecChoice:
            if name in self._float_buffers:
                return CodecChoice(codec=NONE, reason="a buffer")
            if dist.get_world_size(self.group) == 1:
                return SINGLE_RANK
            choice = self.policy.choose(name, tensor)
            return choice.replaced_by(self._monitor.scheme_for(name, choice.codec, self.syncs), tensor)

        groups: list[list[tuple[str, torch.Tensor]]] = [[]]
        for named in {**self._weights, **self._float_buffers}.items():
            if sum(4 * tensor.numel() for _, tensor in groups[-1]) >= bucket_bytes:
                groups.append([])
            groups[-1].append(named)
        for members in groups:
            sizes = [tensor.numel() for _, tensor in members]
            buffer = torch.empty(sum(sizes))
            parts = torch.split(buffer, sizes)
            names = [name for name, _ in members]
            views = [part.view(tensor.shape) for part, (_, tensor) in zip(parts, members, strict=True)]
            yield names, build_layout(buffer, zip(names, views, strict=True), (), choose)


def _run_stages(buckets: Iterable[_PendingBucket]) -> None:
    """Run the stages of all buckets: the first stage of each of them, then the second ones, and so on."""
    running = list(buckets)
    while running:
        in_flight = [(next(bucket.stages, None), bucket) for bucket in running]
        running = []
        for work, bucket in in_flight:
            if work is not None:
                work.wait()
                bucket.layout.wire_bytes += work.wire_bytes
                bucket.layout.seconds = total_seconds((bucket.layout.seconds, work.seconds))
                running.append(bucket)
