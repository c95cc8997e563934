"""`LocalSGD`, which averages the weights of replicas every so many steps.

A step that starts an average of a fragment prepares its messages and starts their collectives (`LocalSGD._start`).
``delay`` steps later, or at once, the averaged differences move the common weights, and these move the model's
(`LocalSGD._apply`). A `PendingAverage` is what is in flight between the two.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from dtcomm import env
from dtcomm.arguments import shares_options
from dtcomm.collectives import broadcast
from dtcomm.collectives.groups import CONSTRUCTOR_LIMIT_S, Announcement, GroupOrMesh, process_group_of
from dtcomm.compress import checkpoint
from dtcomm.compress.bucket import NONE, BucketAverager, BucketLayout, bucket_rows, build_layout
from dtcomm.compress.error_state import ErrorState
from dtcomm.compress.feedback import DGC, Feedback
from dtcomm.compress.guard import Event, count_events
from dtcomm.compress.monitor import Monitor
from dtcomm.compress.payoff import unmeasured
from dtcomm.compress.policy import SINGLE_RANK, CodecChoice, Policy, as_policy, exclusions
from dtcomm.compress.powersgd import Factors
from dtcomm.compress.report import Report, describe_uncompressed
from dtcomm.compress.reporting import Reporting
from dtcomm.compress.spec import Scheme, choose_feedback
from dtcomm.compress.traffic import ParameterTotals, group_rows, total_seconds
from dtcomm.kernels import counter_rng
from dtcomm.local_sgd.fragments import Fragment, PendingAverage, PendingBucket, group_by_size, make_fragments
from dtcomm.local_sgd.islands import Island, local_shard, unwrap
from dtcomm.local_sgd.options import COMPARE, DEFAULTS, Options, checked

_log = logging.getLogger("dtcomm")

WHAT = "differences of weights"  # what the ranks average, in reports


@shares_options(DEFAULTS, Options)
class LocalSGD(Reporting):
    """Keeps the replicas of a model together by averaging weights; call `step` after each optimizer step.

    All ranks start with rank 0's weights. Frozen parameters stay as they are; floating-point buffers (running means)
    are averaged uncompressed. Each rank keeps an fp32 copy of the common weights,
    with the same bits on all ranks.

    With ``fragments`` above 1 the model is averaged in parts, one after the other within ``every`` steps, so that
    messages are smaller and spread over time. With ``delay`` above 0 an average is sent while the model is trained on.
    The differences after step t are averaged, and the outer optimizer moves the common weights of the fragment. After
    step t + ``delay`` its weights w become w + ``mixing`` (common - w). This is Streaming DiLoCo.

    Args:
        model: The model. With islands, which are groups of ranks that train one replica together, it may be wrapped in
            DDP or have DTensors as parameters (FSDP2, tensor parallelism) over the ranks of the island.
        every: The number of steps between two averages of a fragment. Default 16.
        codec: What the differences are compressed with, as for `dtcomm.ddp.compress`, but neither "auto" nor dgc.
            Default "int8".
        group: The process group that averages, or one axis of a device mesh; None is the default group. With islands:
            this rank's group of those that have one rank of each island, at equal positions.
        feedback: Error feedback, as for `dtcomm.ddp.compress`. Default "auto".

    Attributes:
        policy: The policy.
        steps: The number of steps.
        syncs: The number of averages that were started.

    Raises:
        TypeError: ``model`` is not a module, or synchronises the ranks of ``group`` by itself.
        ValueError: An option is out of range, or no parameter requires gradients.

    Example::

        local = LocalSGD(model, every=16, codec="int8")
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    """

    integration = "LocalSGD"

    def __init__(
        self,
        model: torch.nn.Module,
        every: int = 16,
        codec: str | Scheme | Policy = "int8",
        group: GroupOrMesh = None,
        feedback: bool | str | Feedback = "auto",
        **options: Unpack[Options],
    ) -> None:
        options, group = checked(every, options), process_group_of(group, "dp")
        outer, guard = options["outer"], options["guard"]
        algorithm, sample_every = options["algorithm"], options["sample_every"]
        delay, mixing = options["delay"], options["mixing"]
        model = unwrap(model, group)
        self._island = Island(model)
        self._island.reshard()
        excluded = exclusions(options["exclude"], [name for name, _ in model.named_parameters()])
        asked = (excluded | as_policy(codec)).for_model(model)
        self.policy = as_policy("none") if env.disabled() else asked
        schemes = [rule.codec for rule in self.policy.rules]
        if any(isinstance(scheme, DGC) for scheme in schemes):
            raise ValueError(
                "codec: dgc has a momentum for gradients; here momentum is the outer optimizer's"
            )
        self.arguments = {"every": every, "codec": asked, "feedback": feedback, **options}
        feedback, self._feedback_reason = choose_feedback(feedback, [rule.codec for rule in asked.rules])
        self._options = {"codec": str(asked), "feedback": str(feedback)}
        self.every, self.warmup, self.group = every, options["warmup"], group
        self.delay, self.mixing = delay, mixing
        self.steps = self.syncs = 0
        self._earlier_steps = 0  # of the runs before the checkpoint that this one continues from
        self._error_state = ErrorState(feedback, options["residual"], schemes)
        self._save_residuals = options["save_residuals"]
        self._algorithm, self._schemes, self._guard = algorithm, schemes, guard
        self._averager = self._make_averager(options["seed"])
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        if not self._weights:
            raise ValueError("model: has no parameters that require gradients")
        self._float_buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        self._fragments = make_fragments(
            model, list(self._weights), list(self._float_buffers), options["fragments"], every
        )
        if dist.get_world_size(group) > 1:
            Announcement(group, "dtcomm.local_sgd.LocalSGD", self.arguments).require_all(CONSTRUCTOR_LIMIT_S)
        root = 0 if group is None else dist.get_global_rank(group, 0)
        with torch.no_grad():
            for tensor in map(local_shard, (*model.parameters(), *model.buffers())):
                if not tensor.numel():
                    continue
                contiguous = tensor.contiguous()
                broadcast(contiguous, root, group=group)
                tensor.copy_(contiguous)
        self._common = [local_shard(weight).float().clone() for weight in self._weights.values()]
        self._outer = None if outer is None else outer(self._common)
        self._compresses = any(scheme != NONE for scheme in schemes)
        self._monitor = self._make_monitor()
        self._sample_every, self._bucket_bytes = sample_every, options["bucket_bytes"]
        self._in_flight: deque[PendingAverage] = deque()
        self._retired: list[BucketLayout] = []
        self._update_layouts()
        if self._compresses and dist.get_world_size(group) > 1 and dist.get_rank(group) == 0:
            numel = sum(
                shard.numel()
                for name in self._weights
                if self.policy.choose(name, shard := self._shard(name)).codec != NONE
            )
            self._error_state.log_memory("dtcomm.LocalSGD", numel, self._feedback_reason)
            if text := self.report().uncompressed:
                _log.warning("dtcomm.LocalSGD: %s", text)

    def step(self) -> bool:
        """Count a step of this rank, and start and apply the averages that are due.

        Returns:
            Whether an average was applied: the common weights of at least one fragment have changed.

        Raises:
            FloatingPointError: A rank sent NaN or Inf, as for `sync`.
        """
        self.steps += 1
        if self.steps <= self.warmup:
            self.sync()
            applied = True
        else:
            applied = self._apply_due()
            for fragment in self._fragments:
                if fragment.is_due(self.steps - self.warmup, self.every):
                    self._in_flight.append(self._start([fragment], self.steps + self.delay))
            applied = self._apply_due() or applied
        return applied

    def sync(self) -> None:
        """Average all fragments now, on all ranks at the same time; all ranks then have the common weights.

        Averages in flight are applied first. Call it before an evaluation or a checkpoint, for instance. The host waits
        for the mean.

        Raises:
            FloatingPointError: A rank sent NaN or Inf. It is raised on every rank, and all of them have the weights of
                the last average.
        """
        while self._in_flight:
            self._apply(self._in_flight.popleft(), self.mixing)
        self._apply(self._start(self._fragments, self.steps), mixing=1.0)

    def report(self) -> Report:
        """Return what was sent and saved, compared with uncompressed averages at the same steps."""
        totals: dict[str, ParameterTotals] = {}
        buckets = dict(enumerate(layout for _, layout in self._buckets))
        layouts = [*self._retired, *buckets.values()]
        for layout in layouts:
            layout.add_to(totals)
        rows = group_rows(totals.items(), WHAT)
        return Report(
            integration=self.integration,
            rank=dist.get_rank(self.group),
            world_size=dist.get_world_size(self.group),
            policy=f"{self._schedule()}: {self.policy}",
            feedback=self._error_state.kind,
            feedback_reason=self._feedback_reason,
            steps=self.steps - self._earlier_steps,
            earlier_steps=self._earlier_steps,
            messages=sum(layout.messages for layout in layouts),
            wire_bytes=sum(layout.wire_bytes for layout in layouts),
            plain_bytes=round(sum(layout.plain_bytes for layout in layouts)),
            leaving_bytes=self._averager.leaving_bytes(layouts),
            seconds=total_seconds(layout.seconds for layout in layouts),
            residual_bytes=self._error_state.persistent_bytes(),
            memory={
                **self._error_state.nbytes(),
                "common weights": sum(4 * common.numel() for common in self._common),
                **self._in_flight_bytes(),
            },
            events=count_events(self.events),
            fidelity=self._monitor.fidelity,
            rows=tuple(rows),
            by_message=tuple(bucket_rows(WHAT, self._retired, buckets, totals, {})),
            uncompressed=describe_uncompressed(rows) if self._compresses else "",
            unmeasured=unmeasured(remedy=COMPARE),
        )

    def _make_averager(self, seed: int, factors: Factors | None = None) -> BucketAverager:
        return BucketAverager(self._algorithm, self.group, seed, self._schemes, factors)

    def _make_monitor(self) -> Monitor:
        guard = self._guard if self._compresses else None
        monitor = Monitor(guard, self.group, agreeing_groups=self._island.tensor_parallel_groups)
        self._loss_watch = None if self._guard is None else monitor
        return monitor

    def _in_flight_bytes(self) -> dict[str, int]:
        """Return the bytes of averages in flight, for reports; empty if there are none."""
        size = sum(
            4 * self._shard(name).numel()
            for average in self._in_flight
            for fragment in average.fragments
            for name in fragment.names
        )
        return {"averages in flight": size} if size else {}

    def _schedule(self) -> str:
        """Return when and how averages are made, for reports."""
        text = f"every {self.every} steps"
        if len(self._fragments) > 1:
            text += f", {len(self._fragments)} fragments"
        if self.delay:
            text += f", applied {self.delay} steps late"
        return text if self.mixing == 1 else f"{text} with mixing {self.mixing:g}"

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard found and did, in order; the same on all ranks. Its steps are averages."""
        return tuple(self._monitor.events)

    def detach(self) -> None:
        """Average uncompressed from the next average on; call it on every rank, after the same step.

        Averages in flight are applied when they are due. Residuals and factors are freed.
        """
        for average in self._in_flight:
            self._complete(average)
        self.policy, self._compresses, self._error_state = as_policy("none"), False, ErrorState(False)
        self._averager.factors.load_state_dict({})
        for _, layout in self._buckets:
            layout.revision = -1  # `_update_layouts` builds them anew

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; the host waits for averages in flight, which stay to be applied when they are due.

        Every rank saves its own, and its model's weights: between averages they differ. With averages in flight all
        ranks call it after the same step.
        """
        for average in self._in_flight:
            self._complete(average)
        return checkpoint.seal(
            {
                "integration": self.integration,
                "steps": self.steps,
                "syncs": self.syncs,
                "seed": self._averager.seed,
                "rank": dist.get_rank(self.group),
                "world_size": dist.get_world_size(self.group),
                "options": self._options,
                **self._error_state.state_dict(residuals=self._save_residuals),
                "factors": self._averager.factors.state_dict(),
                "watch": self._monitor.state_dict(),
                "common": {name: common.clone() for name, common in self._named_common().items()},
                "outer": {} if self._outer is None else copy.deepcopy(self._outer.state_dict()),
                "averages": [fragment.averages for fragment in self._fragments],
                "in_flight": [
                    {
                        "number": average.number,
                        "due": average.due,
                        "means": {name: mean.clone() for name, mean in average.means.items()},
                    }
                    for average in self._in_flight
                ],
            }
        )

    def _named_common(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._weights, self._common, strict=True))

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continue from a checkpoint.

        Args:
            state: What `state_dict` returned on this rank, or, if the number of ranks has changed, the list of all
                ranks' states in rank order.
            strict: Refuse a state that was saved with another ``codec`` or ``feedback``; False: of the compression load
                its residuals alone.

        Raises:
            ValueError: The state is damaged, an entry is missing or not valid, or a single state comes from another
                number of ranks. Or the parameters are not this model's, or it was saved with other options, or while
                averages of other fragments were in flight. Nothing has changed.
        """
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        sizes = {name: local_shard(weight).numel() for name, weight in self._weights.items()}
        checks = {
            "steps": checkpoint.COUNT,
            "syncs": checkpoint.COUNT,
            **self._error_state.checks(sizes),
            "factors": self._averager.factors.check(sizes),
            "watch": checkpoint.WATCH_CHECK,
            "common": checkpoint.shaped_like(self._named_common()),
            "outer": checkpoint.entries(),
            "averages": checkpoint.each(checkpoint.COUNT, checkpoint.LIST),
            "in_flight": checkpoint.each(
                checkpoint.entries(
                    number=checkpoint.COUNT,
                    due=checkpoint.COUNT,
                    means=checkpoint.tensors(sizes, finite=False),
                ),
                checkpoint.LIST,
            ),
        }
        first, residuals = checkpoint.select_share(state, rank, world_size, checks, self.integration)
        in_flight = [self._restore(saved) for saved in first["in_flight"]]
        same_options = checkpoint.has_options(first, self._options, strict)
        for average in self._in_flight:
            self._complete(average)  # its collectives cannot be called off
        with contextlib.ExitStack() as outer:
            if self._outer is not None:
                outer.enter_context(checkpoint.loaded_optimizer("outer", self._outer, first["outer"]))
            self._error_state.load(state, residuals, rank, world_size, residuals_only=not same_options)
        self._in_flight = deque(in_flight)
        self._averager.factors.load_state_dict(first["factors"] if same_options else {})
        self._monitor.load_state_dict(first["watch"])
        self._earlier_steps = first["steps"] - (self.steps - self._earlier_steps)
        self._averager.seed, self.steps, self.syncs = first["seed"], first["steps"], first["syncs"]
        averages = first["averages"]
        for index, fragment in enumerate(self._fragments):
            same = len(averages) == len(self._fragments)
            fragment.averages = averages[index] if same else self.syncs
        for name, common in zip(self._weights, self._common, strict=True):
            common.copy_(first["common"][name])

    def _restore(self, saved: Mapping[str, Any]) -> PendingAverage:
        """Return an average that was in flight when a state was saved."""
        names = saved["means"].keys()
        fragments = [fragment for fragment in self._fragments if names & set(fragment.names)]
        expected = {name for fragment in fragments for name in fragment.names if self._shard(name).numel()}
        if expected != names:
            raise ValueError(
                f"state: saved while an average of {len(names)} tensors was in flight, which are not whole fragments "
                "here; load it with the fragments and the pattern of the run that saved it"
            )
        means = {name: mean.to(self._common[0].device, copy=True) for name, mean in saved["means"].items()}
        return PendingAverage(fragments, saved["number"], saved["due"], means=means)

    @torch.no_grad()
    def _start(self, fragments: Sequence[Fragment], due: int) -> PendingAverage:
        """Start to average fragments: the first stage of each of their buckets is in flight."""
        if thawed := [name for name, parameter in self._frozen.items() if parameter.requires_grad]:
            raise ValueError(
                f"model: {', '.join(thawed)} did not require gradients when this LocalSGD was made, so it is not "
                "averaged; make a new LocalSGD after layers are unfrozen"
            )
        self._monitor.begin_step(self.syncs)
        self._update_layouts()
        messages = [(fragment, *bucket) for fragment in fragments for bucket in fragment.buckets]
        average = PendingAverage(list(fragments), self.syncs, due)
        if messages:
            average.stats = self._monitor.stats_tensor(self._common[0].device)
        last = len(messages) - 1
        average.buckets = [
            self._prepare(names, layout, fragment.averages, average.stats if index == last else None)
            for index, (fragment, names, layout) in enumerate(messages)
        ]
        for bucket in average.buckets:
            bucket.work = next(bucket.stages, None)
        self.syncs += 1
        for fragment in fragments:
            fragment.averages += 1
        return average

    @torch.no_grad()
    def _complete(self, average: PendingAverage) -> None:
        """Wait for an average, and store what its encodings lost; it is not applied yet."""
        if average.means:
            return
        running = average.buckets
        while running:
            for bucket in running:
                if bucket.work is not None:
                    bucket.work.wait()
                    bucket.layout.wire_bytes += bucket.work.wire_bytes
                    bucket.layout.seconds = total_seconds((bucket.layout.seconds, bucket.work.seconds))
            for bucket in running:
                bucket.work = next(bucket.stages, None)
            running = [bucket for bucket in running if bucket.work is not None]
        key = counter_rng.mix_key(self._averager.seed, dist.get_rank(self.group), average.number + 1)
        for bucket in average.buckets:
            for pending in bucket.pending:
                self._error_state.finish(pending, key)
            parts = torch.split(bucket.buffer, [self._shard(name).numel() for name in bucket.names])
            average.means |= dict(zip(bucket.names, parts, strict=True))

    def _apply_due(self) -> bool:
        """Apply the averages that are due after this step; return whether there were any."""
        applied = False
        while self._in_flight and self._in_flight[0].due <= self.steps:
            self._apply(self._in_flight.popleft(), self.mixing)
            applied = True
        return applied

    @torch.no_grad()
    def _apply(self, average: PendingAverage, mixing: float) -> None:
        """Move the common weights of an average's fragments, and the model's by ``mixing`` towards them."""
        if self._take_in(average):
            self._island.reshard()
            self._move_model([name for fragment in average.fragments for name in fragment.weights], mixing)
            return
        while self._in_flight:
            self._take_in(self._in_flight.popleft())
        self._island.reshard()
        self._move_model(self._weights, mixing=1.0)
        raise FloatingPointError(
            f"average {average.number + 1}, after {self.steps} steps: a rank sent NaN or Inf; "
            "all ranks have the weights of the average before"
        )

    def _take_in(self, average: PendingAverage) -> bool:
        """Complete an average and move the common weights; return False, and move nothing, if it is not finite."""
        self._complete(average)
        for bucket in average.buckets:
            self._measure(bucket)
        if average.stats is not None:
            self._monitor.average_over_agreeing_groups(average.stats)
            self._monitor.evaluate(average.number + 1, average.stats)
        for name in self._monitor.pop_resets():
            self._error_state.reset(name)
        for name in self._monitor.pop_changes():
            self._averager.factors.forget(name)
        finite = all(bool(torch.isfinite(mean).all()) for mean in average.means.values())
        finite = self._island.all(finite, self._common[0].device)
        if finite:
            self._update_common(average.means)
        return finite

    def _move_model(self, names: Iterable[str], mixing: float) -> None:
        """Move weights of the model towards the common ones."""
        common = dict(zip(self._weights, self._common, strict=True))
        for name in names:
            weight = local_shard(self._weights[name])
            weight.copy_(common[name] if mixing == 1 else torch.lerp(weight.float(), common[name], mixing))

    def _prepare(
        self, names: list[str], layout: BucketLayout, averages: int, stats: torch.Tensor | None
    ) -> PendingBucket:
        """Return a bucket with error feedback applied; none of its stages has begun.

        ``averages`` is the number of earlier averages of its fragment.
        """
        buffer, ranks = self._differences(names), dist.get_world_size(self.group)
        sampled = self._sample_every > 0 and averages % self._sample_every == 0
        measurement = self._monitor.measure_gradient(layout, buffer)
        prepared = self._error_state.prepare_bucket(layout, buffer, ranks, sampled=sampled)
        layout.messages += 1
        stages = self._averager.stages(layout, prepared.tensors, prepared.residuals, stats, averages)
        return PendingBucket(names, layout, stages, buffer, prepared.pending, prepared.norms, measurement)

    def _measure(self, bucket: PendingBucket) -> None:
        """Record what was lost of a bucket, and its mean, for the guard and the report."""
        if bucket.norms is not None:
            for pending in bucket.pending:
                self._monitor.register_sample(pending.segment.name, pending.segment.codec)
            lost = [pending.residual for pending in bucket.pending]
            names = [pending.segment.name for pending in bucket.pending]
            self._monitor.record_residuals(names, bucket.layout.add_sample(bucket.norms, lost))
        self._monitor.record_mean(bucket.measurement, bucket.layout, bucket.buffer)

    def _shard(self, name: str) -> torch.Tensor:
        """Return this rank's part of a weight or a buffer."""
        return local_shard(self._weights[name] if name in self._weights else self._float_buffers[name])

    def _differences(self, names: Sequence[str]) -> torch.Tensor:
        """Return common - own of the weights, and the values of the buffers, as one fp32 tensor."""
        common = dict(zip(self._weights, self._common, strict=True))
        return torch.cat(
            [
                (common[name] - self._shard(name) if name in common else self._shard(name)).flatten().float()
                for name in names
            ]
        )

    def _update_common(self, means: Mapping[str, torch.Tensor]) -> None:
        """Move the common weights by the averaged differences, and set the buffers."""
        common = dict(zip(self._weights, self._common, strict=True))
        for name, mean in means.items():
            target = common[name] if name in common else self._shard(name)
            if name not in common:
                target.copy_(mean.view_as(target))
            elif self._outer is None:
                target.sub_(mean.view_as(target))
            else:
                target.grad = mean.view_as(target)
        if self._outer is not None:
            # Optimizers leave out what has no gradient, so the other fragments and their momenta stay as they are.
            self._outer.step()
            self._outer.zero_grad()

    @property
    def _buckets(self) -> list[tuple[list[str], BucketLayout]]:
        """The names and the layout of every bucket."""
        return [bucket for fragment in self._fragments for bucket in fragment.buckets]

    def _update_layouts(self) -> None:
        """Build the layouts, if there are none or the guard has changed the scheme of a weight."""
        revision = self._monitor.revision
        buckets = self._buckets
        if buckets and all(layout.revision == revision for _, layout in buckets):
            return
        self._retired += [layout for _, layout in buckets]
        for fragment in self._fragments:
            fragment.buckets = list(self._build_layouts(fragment.names))
        for _, layout in self._buckets:
            layout.revision = revision
            layout.level_shares = self._averager.level_shares(self._common[0])

    def _build_layouts(self, wanted: Sequence[str]) -> Iterator[tuple[list[str], BucketLayout]]:
        """Yield the names and the layout of every bucket of some weights and buffers."""

        def choose(name: str, tensor: torch.Tensor) -> CodecChoice:
            if name in self._float_buffers:
                return CodecChoice(codec=NONE, reason="a buffer")
            if dist.get_world_size(self.group) == 1:
                return SINGLE_RANK
            choice = self.policy.choose(name, tensor)
            return choice.replaced_by(self._monitor.scheme_for(name, choice.codec, self.syncs), tensor)

        for members in group_by_size(((name, self._shard(name)) for name in wanted), self._bucket_bytes):
            sizes = [tensor.numel() for _, tensor in members]
            buffer = torch.empty(sum(sizes))
            parts = torch.split(buffer, sizes)
            names = [name for name, _ in members]
            views = [part.view(tensor.shape) for part, (_, tensor) in zip(parts, members, strict=True)]
            yield names, build_layout(buffer, zip(names, views, strict=True), (), choose)
