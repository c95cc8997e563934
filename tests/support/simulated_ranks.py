"""Gradient compression and local SGD of several ranks simulated in one thread, bit for bit.

Every rank has its own error state and factors, as in separate processes. The averages are computed by the kernels in
rank order, so that a run ends with the same bits as DDP with ``algorithm="one_shot"``. The local SGD, DiLoCo and
Streaming DiLoCo below are the reference for `dtcomm.local_sgd.LocalSGD` with that algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtcomm.codecs import RandK, codec, parse_levels
from dtcomm.compress.bucket import BucketAverager, BucketLayout, Segment, build_layout
from dtcomm.compress.error_state import ErrorState, PendingGradient
from dtcomm.compress.feedback import DGC, Feedback
from dtcomm.compress.policy import CodecChoice, Policy, as_policy
from dtcomm.compress.spec import Scheme, choose_feedback
from dtcomm.kernels import counter_rng, local_tasks, ops
from dtcomm.work import COMPLETED, Work


@dataclass
class _Call:
    tensors: Sequence[torch.Tensor]
    codecs: Sequence[Any]
    residuals: Sequence[torch.Tensor | None]
    seed: int


class SimulatedAllReduce:
    """Collects the calls of all ranks; the last rank's call computes the result of all of them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.payload_bytes = 0  # sent by one rank, over all calls
        self._calls: list[_Call] = []

    def for_next_rank(self) -> Callable[..., Work]:
        """Return the collective of the next rank.

        It takes the arguments of `all_reduce_coalesced` that are needed here.
        """

        def call(tensors: Sequence[torch.Tensor], op: str, **options: Any) -> Work:
            if op != "avg":
                raise ValueError(f"op: {op!r}; valid: avg")
            self._calls.append(_Call(tensors, options["codec"], options["residuals"], options["seed"]))
            if len(self._calls) == self.ranks:
                calls, self._calls = self._calls, []
                self._run(calls)
            return COMPLETED  # the last rank's call has computed the result before anything reads it

        return call

    def _run(self, calls: list[_Call]) -> None:
        first = calls[0]
        for position, (tensor, spec) in enumerate(zip(first.tensors, first.codecs, strict=True)):
            layout: Any = parse_levels(spec)[0]  # all ranks are on one host
            if layout.needs_agreement:
                self._run_shared_positions(layout, calls, position)
                continue
            payloads = [
                ops.encode(
                    layout,
                    call.tensors[position],
                    key=counter_rng.mix_key(call.seed, rank, 0),
                    residual=call.residuals[position],
                )
                for rank, call in enumerate(calls)
            ]
            self.payload_bytes += payloads[0].numel()
            mean = ops.reduce(layout, payloads, tensor.numel(), divisor=self.ranks, dtype=tensor.dtype)
            for call in calls:
                call.tensors[position].copy_(mean)

    def _run_shared_positions(self, layout: RandK, calls: list[_Call], position: int) -> None:
        """Average one tensor whose values are added at random positions shared by all ranks."""
        numel, seed = calls[0].tensors[position].numel(), calls[0].seed
        key, kept, values = local_tasks.shared_key(seed), layout.kept_in(numel), layout.value_codec()
        payloads, residuals_at_positions = [], []
        for rank, call in enumerate(calls):
            x, residual = call.tensors[position], call.residuals[position]
            values_at_positions = torch.empty(kept)
            residuals_at_positions.append(None if residual is None else torch.empty(kept))
            local_tasks.gather_values(
                layout, key, 0, x, residual, values_at_positions, residuals_at_positions[-1]
            )()
            rounding = counter_rng.mix_key(seed, rank, 0)
            payloads.append(
                ops.encode(values, values_at_positions, key=rounding, residual=residuals_at_positions[-1])
            )
        self.payload_bytes += payloads[0].numel()
        mean = ops.reduce(values, payloads, kept, divisor=self.ranks)
        for call, residual_at_positions in zip(calls, residuals_at_positions, strict=True):
            residual = call.residuals[position]
            if residual is not None and residual_at_positions is not None:
                local_tasks.restore_residual(layout, key, 0, residual_at_positions, residual)()
            local_tasks.scatter_values(layout, key, 0, residual is None, mean, call.tensors[position])()


class SimulatedRanks:
    """Averages the gradients of ``parameters`` over ``ranks`` simulated ranks under a compression ``spec``.

    Args:
        spec: A codec, scheme or policy, as `dtcomm.ddp.DDPState` takes it.
        ranks: Number of simulated ranks.
        parameters: (name, tensor) pairs.
        feedback, residual, seed: As for `dtcomm.ddp.DDPState`.
    """

    def __init__(
        self,
        spec: str | Scheme | Policy,
        ranks: int,
        parameters: Sequence[tuple[str, torch.Tensor]],
        *,
        feedback: bool | str | Feedback = "auto",
        residual: str = "fp32",
        seed: int = 0,
    ) -> None:
        self.policy = as_policy(spec)
        self.parameters = list(parameters)
        self.all_reduce = SimulatedAllReduce(ranks)
        schemes = [rule.codec for rule in self.policy.rules]
        feedback, _ = choose_feedback(feedback, schemes)
        self.error_states = [ErrorState(feedback, residual, schemes) for _ in range(ranks)]
        reduces = [self.all_reduce.for_next_rank() for _ in range(ranks)]
        self._averagers = [BucketAverager("one_shot", None, seed, all_reduce=reduce) for reduce in reduces]
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        self.steps = 0

    def average(self, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the averaged gradients of all parameters; ``gradients[rank]`` lists a rank's, all of one dtype."""
        step = self.steps
        self.steps += 1
        buffers = [torch.cat([gradient.flatten() for gradient in own]) for own in gradients]
        layout = self._layout(buffers[0], step)
        pending: list[list[PendingGradient]] = []
        stages_by_rank = []
        for rank, (averager, buffer) in enumerate(zip(self._averagers, buffers, strict=True)):
            tensors: list[torch.Tensor] = []
            residuals: list[torch.Tensor | None] = []
            own: list[PendingGradient] = []
            for segment, tensor in zip(layout.segments, layout.split(buffer), strict=True):
                if segment.lossless:
                    self.error_states[rank].prepare_uncompressed(segment, tensor)
                    tensors.append(tensor)
                    residuals.append(None)
                else:
                    own.append(self._prepare(rank, segment, tensor))
                    tensors.append(own[-1].sent)
                    residuals.append(own[-1].residual)
            pending.append(own)
            stages_by_rank.append(averager.stages(layout, tensors, residuals, None, step))
        while [work for stages in stages_by_rank if (work := next(stages, None)) is not None]:
            pass
        for rank, (error_state, own) in enumerate(zip(self.error_states, pending, strict=True)):
            self._record_errors(rank, own)
            for gradient in own:
                error_state.finish(gradient, counter_rng.mix_key(self._averagers[rank].seed, rank, step))
        return self._split(buffers[0])

    def _prepare(self, rank: int, segment: Segment, gradient: torch.Tensor) -> PendingGradient:
        return self.error_states[rank].prepare(segment, gradient, self.all_reduce.ranks)

    def _record_errors(self, rank: int, pending: Sequence[PendingGradient]) -> None:
        """Measure what the encodings of a rank's gradients lost, where a subclass has something to measure."""

    def _layout(self, buffer: torch.Tensor, step: int) -> BucketLayout:
        def choose(name: str, gradient: torch.Tensor) -> CodecChoice:
            choice = self.policy.choose(name, gradient)
            return CodecChoice(codec=choice.codec.at(step)) if isinstance(choice.codec, DGC) else choice

        schemes = [rule.codec for rule in self.policy.rules]
        stage = tuple(scheme.warmup_stage(step) for scheme in schemes if isinstance(scheme, DGC))
        if stage not in self._layouts:
            names = [name for name, _ in self.parameters]
            named = zip(names, self._split(buffer), strict=True)
            self._layouts[stage] = build_layout(buffer, named, stage, choose)
        return self._layouts[stage]

    def _split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        sizes = [parameter.numel() for _, parameter in self.parameters]
        return [
            part.view(parameter.shape)
            for part, (_, parameter) in zip(torch.split(buffer, sizes), self.parameters, strict=True)
        ]


def uncompressed_bytes(parameters: Sequence[tuple[str, torch.Tensor]]) -> int:
    """Return the bytes of the same gradients without compression."""
    return sum(codec("none").wire_bytes(parameter.numel(), parameter.dtype) for _, parameter in parameters)


@dataclass
class _Average:
    """The mean of a fragment's differences, which is applied after the step ``due``."""

    fragment: int
    due: int
    means: list[torch.Tensor]


class SimulatedLocalSGD:
    """Averages the replicas of a model; call `step` after each of them has made an optimizer step.

    Args:
        replicas: The model of each worker, with the same weights.
        every: As for `dtcomm.local_sgd.LocalSGD`, as for the others.
        spec: What the differences are compressed with.
        fragments: The names of the parameters of each fragment. Default: one fragment with all of them.
        outer: Makes the outer optimizer.
        delay: The number of steps from the start of an average until it is applied.
        mixing: The weight of the common weights when an average is applied.
        feedback: Error feedback.

    Attributes:
        common: The common weights by name.
        steps: The number of steps.
        sent: The bytes of one worker's payloads in each step.
    """

    def __init__(
        self,
        replicas: Sequence[torch.nn.Module],
        every: int,
        spec: str,
        *,
        fragments: Sequence[Sequence[str]] = (),
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        delay: int = 0,
        mixing: float = 1.0,
        feedback: bool | str | Feedback = "auto",
    ) -> None:
        self._replicas = [dict(replica.named_parameters()) for replica in replicas]
        self.common = {name: weight.detach().clone() for name, weight in self._replicas[0].items()}
        self.steps = 0
        self.sent: list[int] = []
        self._every, self._delay, self._mixing = every, delay, mixing
        self._fragments = [list(names) for names in fragments] or [list(self.common)]
        self._outer = None if outer is None else outer(list(self.common.values()))
        self._runs = [
            SimulatedRanks(
                spec, len(replicas), [(name, self.common[name]) for name in names], feedback=feedback
            )
            for names in self._fragments
        ]
        self._in_flight: list[_Average] = []

    @torch.no_grad()
    def step(self) -> None:
        """Start and apply the averages that are due after this step."""
        self.steps += 1
        before = self._payload_bytes()
        for fragment in range(len(self._fragments)):
            first = (fragment + 1) * self._every // len(self._fragments)
            if self.steps >= first and (self.steps - first) % self._every == 0:
                self._in_flight.append(_Average(fragment, self.steps + self._delay, self._average(fragment)))
        while self._in_flight and self._in_flight[0].due <= self.steps:
            self._apply(self._in_flight.pop(0), self._mixing)
        self.sent.append(self._payload_bytes() - before)

    @torch.no_grad()
    def sync(self) -> None:
        """Apply what is in flight, then average all fragments at once."""
        before = self._payload_bytes()
        while self._in_flight:
            self._apply(self._in_flight.pop(0), self._mixing)
        for fragment in range(len(self._fragments)):
            self._apply(_Average(fragment, self.steps, self._average(fragment)), 1.0)
        self.sent.append(self._payload_bytes() - before)

    def _average(self, fragment: int) -> list[torch.Tensor]:
        """Return the mean over workers of common - own."""
        names = self._fragments[fragment]
        return self._runs[fragment].average(
            [[self.common[name] - replica[name] for name in names] for replica in self._replicas]
        )

    def _apply(self, average: _Average, mixing: float) -> None:
        names = self._fragments[average.fragment]
        for name, mean in zip(names, average.means, strict=True):
            if self._outer is None:
                self.common[name] -= mean
            else:
                self.common[name].grad = mean.clone()
        if self._outer is not None:
            self._outer.step()
            self._outer.zero_grad()
        for replica in self._replicas:
            for name in names:
                replica[name].copy_(torch.lerp(replica[name], self.common[name], mixing))

    def _payload_bytes(self) -> int:
        return sum(run.all_reduce.payload_bytes for run in self._runs)
