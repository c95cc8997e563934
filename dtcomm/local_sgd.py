"""Local SGD: every rank trains on its own and, every so many steps, the ranks average how far they have come.

Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767); with synchronous steps at first,
post-local SGD (Lin, Stich, Patel, Jaggi 2020, arXiv:1808.07217); with an outer optimiser, DiLoCo (Douillard et al.
2023, arXiv:2311.08105). What is sent are the differences to the weights that all ranks had last, which are small and
take compression well; what that loses is fed back as it is for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtcomm.collectives import Work, broadcast
from dtcomm.compress.bucket_averager import NONE, BucketAverager
from dtcomm.compress.bucket_layout import BucketLayout, build_layout
from dtcomm.compress.checkpoint import VERSION, require_matching_sizes, select_share
from dtcomm.compress.dgc import DGC
from dtcomm.compress.error_sample import ErrorSample, l2_norm
from dtcomm.compress.error_state import ErrorState, PendingGradient
from dtcomm.compress.guard import Event, Guard, count_events
from dtcomm.compress.guard_monitor import make_monitor
from dtcomm.compress.policy import SINGLE_RANK, CodecChoice, Policy, as_policy
from dtcomm.compress.report import ParameterTotals, Report, rows, total_seconds
from dtcomm.compress.spec import Scheme
from dtcomm.kernels import counter_rng

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
_GUARD = Guard()


@dataclass
class _Landing:
    """A bucket's differences, which become their mean, what was handed over of them, and samples of it."""

    mean: torch.Tensor
    handed: list[PendingGradient]
    samples: list[ErrorSample]


class LocalSGD:
    """Keeps the replicas of `model` (not wrapped in DDP) together; call `step` after each step of the optimiser.

    every: steps between two averages. spec, feedback, residual, algorithm, seed: as `State` takes them.
    outer: makes the optimiser that takes the averaged difference for a gradient, such as DiLoCo's ``lambda weights:
        torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)``; None: weights are averaged.
    warmup: steps at the start that are averaged every time.
    bucket_bytes: of one message; they travel side by side.
    guard, sample_every: as `State` takes them; what counts as a step there is an average here.

    All ranks start with rank 0's weights. Frozen parameters stay as they are; floating-point buffers (running means)
    are averaged uncompressed. A rank keeps the common weights, fp32, beside the model's own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        every: int = 16,
        spec: str | Scheme | Policy = "int8",
        group: dist.ProcessGroup | None = None,
        feedback: bool | str = True,
        *,
        residual: str = "fp32",
        outer: Outer | None = None,
        warmup: int = 0,
        algorithm: str = "direct",
        seed: int = 0,
        bucket_bytes: int = 25 * 2**20,
        guard: Guard | None = _GUARD,
        sample_every: int = 10,
    ) -> None:
        if isinstance(model, DistributedDataParallel) or not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"model: want a module that nothing else synchronises, got {type(model).__name__}"
            )
        for name, value, least in (
            ("every", every, 1),
            ("warmup", warmup, 0),
            ("bucket_bytes", bucket_bytes, 1),
            ("sample_every", sample_every, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: want {least} or more")
        self.policy = as_policy(spec).of(model)
        schemes = [rule.codec for rule in self.policy.rules]
        if any(isinstance(scheme, DGC) for scheme in schemes):
            raise ValueError("spec: dgc has a momentum for gradients; here momentum is the outer optimiser's")
        self.every, self.warmup, self.group = every, warmup, group
        self.steps = self.syncs = 0
        self._error_state = ErrorState(feedback, residual, schemes)
        self._averager = BucketAverager(algorithm, group, seed)
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._weights:
            raise ValueError("model: has no parameters that require gradients")
        self._running = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        root = 0 if group is None else dist.get_global_rank(group, 0)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                whole = tensor.contiguous()
                broadcast(whole, root, group=group)
                tensor.copy_(whole)
        self._common = [weight.detach().float().clone() for weight in self._weights.values()]
        self._outer = None if outer is None else outer(self._common)
        self._watch = make_monitor(guard if any(scheme != NONE for scheme in schemes) else None)
        self._sample_every, self._bucket_bytes = sample_every, bucket_bytes
        self._retired: list[BucketLayout] = []
        self._buckets: list[tuple[list[str], BucketLayout]] = []
        self._repack()

    def step(self) -> bool:
        """A step of this rank is done; returns whether the ranks were brought together."""
        self.steps += 1
        due = self.steps <= self.warmup or (self.steps - self.warmup) % self.every == 0
        if due:
            self.sync()
        return due

    @torch.no_grad()
    def sync(self) -> None:
        """Average now; on all ranks at the same time, before a checkpoint, say. The host waits for the mean.

        FloatingPointError on every rank where one brought NaN or Inf; all have the weights of the last average then.
        """
        self._watch.begin_step(self.syncs)
        self._repack()
        told = self._watch.stats_tensor(self._common[0].device)
        last = self._buckets[-1][1]
        starting = [
            self._bucket(names, packing, told if packing is last else None)
            for names, packing in self._buckets
        ]
        running = [(stages, packing) for stages, packing, _ in starting]
        while running:
            under_way = [(next(stages, None), stages, packing) for stages, packing in running]
            running = []
            for work, stages, packing in under_way:
                if work is not None:
                    work.wait()
                    packing.wire_bytes += work.wire_bytes
                    packing.seconds = total_seconds((packing.seconds, work.seconds))
                    running.append((stages, packing))
        self.syncs += 1
        key = counter_rng.mix_key(self._averager.seed, dist.get_rank(self.group), self.syncs)
        means = [self._landed(landing, key) for _, _, landing in starting]
        if told is not None:
            self._watch.evaluate(self.syncs, told)
        for name in self._watch.pop_resets():
            self._error_state.reset(name)
        for name in self._watch.pop_changes():
            self._averager.factors.forget(name)
        finite = all(bool(torch.isfinite(buffer).all()) for buffer in means)
        if finite:
            self._move(means)
        for weight, common in zip(self._weights.values(), self._common, strict=True):
            weight.copy_(common)
        if not finite:
            raise FloatingPointError(
                f"average {self.syncs}, after {self.steps} steps: a rank brought NaN or Inf; "
                "all ranks have the weights of the average before"
            )

    def report(self) -> Report:
        """What was sent and saved, against uncompressed averages; the rest is saved by not averaging every step."""
        tallies: dict[str, ParameterTotals] = {}
        packings = [*self._retired, *(packing for _, packing in self._buckets)]
        for packing in packings:
            packing.add_to(tallies)
        return Report(
            policy=f"every {self.every} steps: {self.policy}",
            feedback=self._error_state.kind,
            steps=self.steps,
            messages=sum(packing.messages for packing in packings),
            wire_bytes=sum(packing.wire_bytes for packing in packings),
            plain_bytes=round(sum(packing.plain_bytes for packing in packings)),
            seconds=total_seconds(packing.seconds for packing in packings),
            residual_bytes=self._error_state.persistent_bytes(),
            memory={
                **self._error_state.nbytes(),
                "common weights": sum(4 * common.numel() for common in self._common),
            },
            events=count_events(self.events),
            rows=rows(tallies.items()),
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard saw and did, in order; the same on all ranks. Its steps are averages."""
        return tuple(self._watch.events)

    def observe(self, loss: float | torch.Tensor) -> None:
        """Tell the guard this step's loss, on every rank; what counts is the last one before an average."""
        self._watch.observe_loss(loss)

    def state_dict(self) -> dict[str, Any]:
        """This rank's; every rank saves its own, and its model's weights beside it: between averages they differ."""
        return {
            "version": VERSION,
            "steps": self.steps,
            "syncs": self.syncs,
            "seed": self._averager.seed,
            "rank": dist.get_rank(self.group),
            "world_size": dist.get_world_size(self.group),
            **self._error_state.state_dict(),
            "factors": self._averager.factors.state_dict(),
            "watch": self._watch.state_dict(),
            "common": {
                name: common.clone() for name, common in zip(self._weights, self._common, strict=True)
            },
            "outer": {} if self._outer is None else self._outer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from `state_dict`: this rank's own, or the list of every rank's, where their number has changed."""
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        first, residuals = select_share(state, rank, world_size)
        sizes = {name: weight.numel() for name, weight in self._weights.items()}
        require_matching_sizes(residuals, sizes)
        require_matching_sizes({name: common.flatten() for name, common in first["common"].items()}, sizes)
        self._error_state.load(state, residuals, rank, world_size)
        self._averager.factors.load_state_dict(first["factors"])
        self._watch.load_state_dict(first.get("watch", {}))
        self._averager.seed, self.steps, self.syncs = first["seed"], first["steps"], first["syncs"]
        for name, common in zip(self._weights, self._common, strict=True):
            common.copy_(first["common"][name])
        if self._outer is not None:
            self._outer.load_state_dict(first["outer"])

    def _bucket(
        self, names: Sequence[str], packing: BucketLayout, told: torch.Tensor | None
    ) -> tuple[Iterator[Work], BucketLayout, _Landing]:
        """The stages of a bucket, of which none has begun, and what is needed when they are done."""
        buffer, ranks = self._differences(names), dist.get_world_size(self.group)
        sampled = self._sample_every > 0 and self.syncs % self._sample_every == 0
        samples: list[ErrorSample] = []
        tensors: list[torch.Tensor] = []
        residuals: list[torch.Tensor | None] = []
        handed: list[PendingGradient] = []
        for segment, tensor in zip(packing.segments, packing.split(buffer), strict=True):
            norm = l2_norm(tensor) if sampled and not segment.lossless else 0.0
            given = (
                None
                if segment.lossless
                else self._error_state.prepare(segment, tensor, ranks, sampled=sampled)
            )
            if given is not None:
                handed.append(given)
                if sampled:
                    samples.append(
                        ErrorSample.take(segment.name, segment.codec, norm, given.sent, given.residual)
                    )
                    self._watch.register_sample(segment.name, segment.codec)
            tensors.append(tensor if given is None else given.sent)
            residuals.append(None if given is None else given.residual)
        packing.messages += 1
        stages = self._averager.stages(packing, tensors, residuals, told, self.syncs)
        return stages, packing, _Landing(buffer, handed, samples)

    def _landed(self, landing: _Landing, key: int) -> torch.Tensor:
        lost = {each.segment.name: each.residual for each in landing.handed}
        for sample in landing.samples:
            if (residual := lost[sample.name]) is not None:
                self._watch.record_error(sample, residual)
        self._watch.check_finite(landing.mean)
        for each in landing.handed:
            self._error_state.finish(each, key)
        return landing.mean

    def _differences(self, names: Sequence[str]) -> torch.Tensor:
        common = dict(zip(self._weights, self._common, strict=True))
        return torch.cat(
            [
                (common[name] - self._weights[name] if name in common else self._running[name])
                .flatten()
                .float()
                for name in names
            ]
        )

    def _move(self, means: Iterable[torch.Tensor]) -> None:
        """The common weights follow the averaged differences."""
        common = dict(zip(self._weights, self._common, strict=True))
        for (names, _), buffer in zip(self._buckets, means, strict=True):
            tensors = [common[name] if name in common else self._running[name] for name in names]
            for name, target, part in zip(
                names, tensors, torch.split(buffer, [tensor.numel() for tensor in tensors]), strict=True
            ):
                if name not in common:
                    target.copy_(part.view_as(target))
                elif self._outer is None:
                    target.sub_(part.view_as(target))
                else:
                    target.grad = part.view_as(target)
        if self._outer is not None:
            self._outer.step()
            self._outer.zero_grad()

    def _repack(self) -> None:
        """At first, and where the guard has changed what some weights travel in."""
        if self._buckets and all(packing.revision == self._watch.revision for _, packing in self._buckets):
            return
        self._retired += [packing for _, packing in self._buckets]
        self._buckets = list(self._packed(self._bucket_bytes))
        for _, packing in self._buckets:
            packing.revision = self._watch.revision

    def _packed(self, bucket_bytes: int) -> Iterator[tuple[list[str], BucketLayout]]:
        """Names and packing of every bucket, weights first."""

        def choose(name: str, tensor: torch.Tensor) -> CodecChoice:
            if name in self._running:
                return CodecChoice(codec=NONE, why="a buffer")
            if dist.get_world_size(self.group) == 1:
                return SINGLE_RANK
            choice = self.policy.choose(name, tensor)
            return choice.instead(self._watch.scheme_for(name, choice.codec, self.syncs), tensor)

        groups: list[list[tuple[str, torch.Tensor]]] = [[]]
        for named in {**self._weights, **self._running}.items():
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
