"""Correctly rounded sums: codec ``exact:rounded=true``.

The ranks agree on the range of bits of each block, and then on how many digits the sum takes, which depends on the
data. So a call runs the agreement to its end when it is issued, and the host waits for it; its other stages are queued
like those of other multi-stage sums. docs/how-it-works/exact-sums.md describes the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dtcomm.codecs.cast import MIN_SCATTERED_ELEMENTS
from dtcomm.collectives._multi_stage import (
    DIRECT,
    NONE,
    Check,
    MultiStagePlan,
    PrepareStage,
    Scratch,
    ScratchSize,
    Stage,
    carve,
    flat,
    split,
)
from dtcomm.errors import DtcommError
from dtcomm.kernels import local_tasks
from dtcomm.kernels.local_tasks import SumRange
from dtcomm.kernels.reference.reproducible import NAN_BLOCK
from dtcomm.kernels.reference.rounded_sum import BLOCK
from dtcomm.runtime.types import Buffers, OpHooks, OpSpec, Plan, TensorSpec

KEPT_PLANS = 64  # of sums that take other numbers of digits
MESSAGE_ELEMENTS = 2**20  # of all shards: their digits stay in the cache from the split to the rounding
# Of an all_reduce, and of the reduce_scatter and the all_gather that it may be made of.
SCATTERED = {name: name for name in ("auto", DIRECT, "ring", "halving", "hierarchical")} | {
    "two_shot": "one_shot"
}


class _Region(NamedTuple):
    """Elements of a tensor from ``start`` on: ``numel`` of each shard if they are scattered, else the same of all."""

    part: int
    start: int
    numel: int
    scattered: bool


class RoundedSum(MultiStagePlan):
    """all_reduce, reduce or reduce_scatter of tensors whose codec is ``exact:rounded=true``.

    A large all_reduce is a reduce_scatter of digits, which each rank rounds, and an all_gather of the results. What is
    left of its tensors when they are cut at blocks, is in the digits of every shard. ``prepare`` returns the runtime's
    plan of a stage.
    """

    def __init__(self, prepare: PrepareStage, request: OpSpec, rank: int, ranks: int) -> None:
        self._prepare, self._request = prepare, request
        self._rank, self._ranks = rank, ranks
        self._divisor = ranks if request.op == "avg" else 1
        self._name = str(request.parts[0].codec)
        numels = [part.numel for part in request.parts]
        self._scatters = (
            request.collective == "all_reduce"
            and request.algorithm in SCATTERED
            and sum(numels) >= max(MIN_SCATTERED_ELEMENTS, 16 * BLOCK * ranks**2 * len(numels))
        )
        # The parts of a tensor that are cut to blocks on their own.
        self._fields = ranks if request.collective == "reduce_scatter" else 1
        self._shards = ranks if self._scatters else self._fields
        direct = request.algorithm if request.collective == "all_reduce" else DIRECT
        self._maximum = request._replace(collective="all_reduce", op="max", algorithm=direct, root=0)
        self._sum = request._replace(op="sum")
        if self._scatters:
            algorithm = SCATTERED[request.algorithm]
            self._sum = self._sum._replace(collective="reduce_scatter", algorithm=algorithm)
        self._gather = self._sum._replace(collective="all_gather")
        self._messages = self._cut([part.numel for part in request.parts])
        self._plans: dict[tuple[str, tuple[ScratchSize, ...]], Plan] = {}

    def _cut(self, numels: Sequence[int]) -> list[list[_Region]]:
        """Return the regions of each message."""
        most = max(BLOCK, MESSAGE_ELEMENTS // self._shards // BLOCK * BLOCK)
        regions: list[_Region] = []
        for part, numel in enumerate(numels):
            share = numel // (self._shards * BLOCK) * BLOCK if self._scatters else 0
            for at in range(0, share, most):
                count = min(most, share - at)
                regions.append(_Region(part, at * self._shards, count, True))
            for at in range(share * self._shards, numel, most):
                regions.append(_Region(part, at, min(most, numel - at), False))
        messages: list[list[_Region]] = []
        room = 0
        for region in regions:
            if region.numel > room:
                messages.append([])
                room = most
            messages[-1].append(region)
            room -= region.numel
        return messages

    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        if any(part.residual is not None for part in buffers):
            raise ValueError(f"residual: {self._name} loses nothing that a residual could keep; valid: None")
        inputs = [x for part in buffers for x in split(part.input, self._fields) if x is not None]
        blocks = [-(-x.numel() // BLOCK) for x in inputs]
        ranges = torch.empty(2, sum(blocks), dtype=torch.uint8, device=inputs[0].device)
        agreed = SumRange(self._ranks, *ranges)
        check = None
        on_host = self._agree(inputs, agreed.split(blocks), ranges, seed, finite_only=False)
        finite = not (on_host[0] == NAN_BLOCK).any()
        if not finite:
            check = self._agree_on_non_finite(buffers, seed)
            on_host = self._agree(inputs, agreed.split(blocks), ranges, seed, finite_only=True)
        counted = SumRange(self._ranks, *on_host)
        of_inputs = list(zip(inputs, agreed.placed().split(blocks), counted.split(blocks), strict=True))
        stages: list[Stage] = []
        for message in self._messages:
            stages += self._stages_of(message, buffers, of_inputs, finite, scratch)
        return stages, check

    def _stages_of(
        self,
        message: Sequence[_Region],
        buffers: Sequence[Buffers],
        inputs: Sequence[tuple[torch.Tensor, SumRange, SumRange]],
        finite: bool,
        scratch: Scratch,
    ) -> list[Stage]:
        """Return the sum of the digits of a message, and the collective of its results if there is one.

        ``inputs`` are tensors, the ranges of their blocks, and these ranges on the host.
        """
        shards, own = self._shards, self._rank if self._shards > 1 else 0
        # For each region its elements, of all shards or for each, and how many digits each shard has.
        pieces, counts = [], []
        for region in message:
            first, numel = region.start, region.numel * (shards if region.scattered else 1)
            fields = inputs[region.part * self._fields : (region.part + 1) * self._fields]
            of_region = [(x[first : first + numel], agreed.of(first, numel)) for x, agreed, _ in fields]
            parts = shards if region.scattered else 1
            count = [n for *_, counted in fields for n in counted.of(first, numel).count_digits(parts)]
            pieces.append(of_region)
            counts.append(count if len(count) == shards else count * shards)
        size = _rounded_up(max(map(sum, zip(*counts, strict=True))))
        scattered = [region for region in message if region.scattered]
        sizes = [(size * shards, torch.int32), (size if shards > 1 else 0, torch.int32)]
        sizes += [(region.numel, self._request.parts[region.part].dtype) for region in scattered]
        digits, own_digits, *results = carve(scratch, sizes)
        summed = own_digits if shards > 1 else digits
        split_tasks, round_tasks = [], []
        gathers: list[Buffers] = []
        at = [shard * size for shard in range(shards)]
        for region, of_region, count in zip(message, pieces, counts, strict=True):
            x, agreed = of_region[own % len(of_region)]
            if region.scattered:
                split_tasks.append(local_tasks.split_digits(agreed, x, finite, digits, at))
                agreed = agreed.of(own * region.numel, region.numel)
            else:
                for shard, offset in enumerate(at):
                    x, of_shard = of_region[shard % len(of_region)]
                    split_tasks.append(local_tasks.split_digits(of_shard, x, finite, digits, [offset]))
            part = summed[at[own] - own * size :][: count[own]]
            at = [offset + n for offset, n in zip(at, count, strict=True)]
            output = buffers[region.part].output
            if output is None:
                continue
            out = flat(output)[region.start :][: region.numel * (shards if region.scattered else 1)]
            if region.scattered:
                gathers.append(Buffers(results[len(gathers)], out))
                out = results[len(gathers) - 1]
            round_tasks.append(local_tasks.round_digits(agreed, part, self._divisor, out))
        tensors = Buffers(digits, summed if round_tasks else None)
        hooks = OpHooks(before=split_tasks, after=round_tasks)
        stages = [Stage(self._plan_of(self._sum, ((size, torch.int32),), "digits"), [tensors], hooks)]
        if gathers:
            stages.append(Stage(self._plan_of(self._gather, tuple(sizes[2:]), "results"), gathers, OpHooks()))
        return stages

    def _agree(
        self,
        inputs: Sequence[torch.Tensor],
        of_inputs: Sequence[SumRange],
        ranges: torch.Tensor,
        seed: int,
        *,
        finite_only: bool,
    ) -> torch.Tensor:
        """Make ``ranges`` the ranges of bits of all ranks, and return them on the host."""
        tasks = [
            local_tasks.measure_digits(x, to, finite_only) for x, to in zip(inputs, of_inputs, strict=True)
        ]
        plan = self._plan_of(self._maximum, ((ranges.numel(), torch.uint8),), "ranges of bits")
        if not ranges.is_cpu and torch.cuda.is_current_stream_capturing():
            raise DtcommError(f"codec: a graph cannot capture {self._name}: the host waits for the ranks")
        plan.run([Buffers(ranges.view(-1), ranges.view(-1))], seed, OpHooks(before=tasks))
        return ranges.cpu()

    def _agree_on_non_finite(self, buffers: Sequence[Buffers], seed: int) -> Check:
        """Return what writes the sums that are Inf or NaN: those of the floating-point standard, in any order."""
        inputs = [flat(part.input).float() for part in buffers if part.input is not None]
        x = torch.cat(inputs)
        x[x.isfinite()] = 0
        plan = self._plan_of(self._maximum._replace(op="sum"), ((x.numel(), x.dtype),), "Inf and NaN")
        plan.run([Buffers(x, x)], seed, None)
        sums = torch.split(x, [tensor.numel() for tensor in inputs])

        def write() -> None:
            for part, values in zip(buffers, sums, strict=True):
                if part.output is not None:
                    first = self._rank * part.output.numel() if self._fields > 1 else 0
                    own, out = values[first : first + part.output.numel()], flat(part.output)
                    out.copy_(torch.where(own.isfinite(), out, own.to(out.dtype)))

        return write

    def _plan_of(self, request: OpSpec, sizes: tuple[ScratchSize, ...], what: str) -> Plan:
        """Return the plan of a stage, whose size may depend on the data. Its name stands for the request."""
        plan = self._plans.pop((what, sizes), None)
        if plan is None:
            parts = tuple(TensorSpec(numel, dtype, NONE) for numel, dtype in sizes)
            plan = self._prepare(request._replace(parts=parts, purpose=f"{what} of {self._name}"))
        self._plans[what, sizes] = plan  # the last one is the one that was used last
        if len(self._plans) > KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan


def _rounded_up(count: int) -> int:
    """Return ``count`` or up to a thirty-second more, so that few plans serve all counts."""
    step = 1 << max(0, count.bit_length() - 6)
    return -(-count // step) * step
