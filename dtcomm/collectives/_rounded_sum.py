"""Correctly rounded sums: codec ``exact:rounded=true``.

The ranks agree on the range of bits of each block, and then on how many digits the sum takes, which depends on the
data. So a call runs the agreement to its end when it is issued; its other stages are queued like those of other
multi-stage sums. docs/how-it-works/exact-sums.md describes the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

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
from dtcomm.kernels import local_tasks
from dtcomm.kernels.local_tasks import SumRange
from dtcomm.kernels.reference.rounded_sum import BLOCK
from dtcomm.runtime.types import Buffers, OpHooks, OpSpec, Plan, TensorSpec

KEPT_PLANS = 64  # of sums that take other numbers of digits
MESSAGE_ELEMENTS = 2**19  # of a rank: their digits stay in the cache from the split to the rounding
MIN_SCATTERED_ELEMENTS = 2**16  # of an all_reduce: below, another stage takes more time than it saves
# Of an all_reduce, and of the reduce_scatter and the all_gather that it may be made of.
SCATTERED = {name: name for name in ("auto", DIRECT, "ring", "halving", "hierarchical")} | {
    "two_shot": "one_shot"
}


class _Region(NamedTuple):
    """Elements of a tensor: each shard adds ``numel`` of them, the first ``start``, and ``stride`` more per shard."""

    part: int
    start: int
    numel: int
    stride: int


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
        self._fields = (
            ranks if request.collective == "reduce_scatter" else 1
        )  # of a tensor, cut to blocks on its own
        self._shards = ranks if self._scatters else self._fields
        self._sum = request._replace(op="sum")
        if self._scatters:
            algorithm = SCATTERED[request.algorithm]
            self._sum = self._sum._replace(collective="reduce_scatter", algorithm=algorithm)
        self._messages = self._cut(numels)
        self._plans: dict[OpSpec, Plan] = {}

    def _cut(self, numels: Sequence[int]) -> list[list[_Region]]:
        """Return the regions of each message."""
        most = max(BLOCK, MESSAGE_ELEMENTS // self._shards // BLOCK * BLOCK)
        regions: list[_Region] = []
        for part, numel in enumerate(numels):
            share = numel // (self._shards * BLOCK) * BLOCK if self._scatters else 0
            for at in range(0, share, most):
                count = min(most, share - at)
                regions.append(_Region(part, at * self._shards, count, count))
            for at in range(share * self._shards, numel, most):
                regions.append(_Region(part, at, min(most, numel - at), 0))
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
        ranges = torch.empty(2, sum(blocks), dtype=torch.uint8)
        of_inputs = [
            SumRange(self._ranks, top, low)
            for top, low in zip(*(torch.split(half, blocks) for half in ranges), strict=True)
        ]
        check = None
        finite = self._agree(inputs, of_inputs, ranges, seed, finite_only=False)
        if not finite:
            check = self._agree_on_non_finite(buffers, seed)
            self._agree(inputs, of_inputs, ranges, seed, finite_only=True)
        stages: list[Stage] = []
        for regions in self._messages:
            shards = [
                [self._piece(inputs, of_inputs, region, shard) for region in regions]
                for shard in range(self._shards)
            ]
            counts = [[agreed.count_digits()[0] for _, agreed in pieces] for pieces in shards]
            size = _rounded_up(max(map(sum, counts)))
            own_size = size if self._shards > 1 else 0
            gathered = [region for region in regions if region.stride]
            sizes = [(size * self._shards, torch.int32), (own_size, torch.int32)]
            sizes += [(region.numel, self._request.parts[region.part].dtype) for region in gathered]
            digits, own_digits, *results = carve(scratch, sizes)
            split_tasks = []
            for shard, (pieces, row) in enumerate(zip(shards, counts, strict=True)):
                parts = torch.split(digits[shard * size : shard * size + sum(row)], row)
                for (x, agreed), part in zip(pieces, parts, strict=True):
                    split_tasks.append(local_tasks.split_digits(agreed, x, finite, part))
            own = self._rank if self._shards > 1 else 0
            summed = own_digits if self._shards > 1 else digits
            round_tasks, gathers = [], []
            results_of = iter(results)
            for region, (_, agreed), part in zip(
                regions, shards[own], torch.split(summed[: sum(counts[own])], counts[own]), strict=True
            ):
                whole = buffers[region.part].output
                if whole is None:
                    continue
                end = region.start + (region.numel * self._ranks if region.stride else region.numel)
                out = flat(whole)[region.start : end]
                if region.stride:
                    result = next(results_of)
                    gathers.append(Buffers(result, out))
                    out = result
                round_tasks.append(local_tasks.round_digits(agreed, part, self._divisor, out))
            plan = self._plan_of(self._stage(self._sum, [(size, torch.int32)], "digits"))
            tensors = Buffers(digits, summed if round_tasks else None)
            stages.append(Stage(plan, [tensors], OpHooks(before=split_tasks, after=round_tasks)))
            if gathers:
                request = self._stage(self._sum._replace(collective="all_gather"), sizes[2:], "results")
                stages.append(Stage(self._plan_of(request), gathers, OpHooks()))
        return stages, check

    def _piece(
        self, inputs: Sequence[torch.Tensor], ranges: Sequence[SumRange], region: _Region, shard: int
    ) -> tuple[torch.Tensor, SumRange]:
        """Return the elements that a shard has of a region, and their ranges."""
        field = region.part * self._fields + (shard if self._fields > 1 else 0)
        first = region.start + shard * region.stride
        blocks = slice(first // BLOCK, -(-(first + region.numel) // BLOCK))
        ranks, tops, lows = ranges[field]
        return inputs[field][first : first + region.numel], SumRange(ranks, tops[blocks], lows[blocks])

    def _agree(
        self,
        inputs: Sequence[torch.Tensor],
        of_inputs: Sequence[SumRange],
        ranges: torch.Tensor,
        seed: int,
        *,
        finite_only: bool,
    ) -> bool:
        """Make ``ranges`` the ranges of bits of all ranks; return whether all elements are finite."""
        tasks = [
            local_tasks.measure_digits(x, to, finite_only) for x, to in zip(inputs, of_inputs, strict=True)
        ]
        flat_ranges = ranges.view(-1)
        self._maximum(flat_ranges).run([Buffers(flat_ranges, flat_ranges)], seed, OpHooks(before=tasks))
        return all(agreed.count_digits()[1] for agreed in of_inputs)

    def _agree_on_non_finite(self, buffers: Sequence[Buffers], seed: int) -> Check:
        """Return what writes the sums that are Inf or NaN: those of the floating-point standard, in any order."""
        inputs = [flat(part.input) for part in buffers if part.input is not None]
        x = torch.cat([tensor.float() for tensor in inputs])
        nan = x.isnan()
        seen = torch.stack([(x == torch.inf) | nan, (x == -torch.inf) | nan]).to(torch.uint8)
        self._maximum(seen).run([Buffers(seen.view(-1), seen.view(-1))], seed, None)
        upper, lower = seen.bool()
        value = torch.where(upper & lower, torch.nan, torch.where(upper, torch.inf, -torch.inf))
        numels = [tensor.numel() for tensor in inputs]

        def write() -> None:
            for part, values, bad in zip(
                buffers, torch.split(value, numels), torch.split(upper | lower, numels), strict=True
            ):
                if part.output is not None:
                    first = self._rank * part.output.numel() if self._fields > 1 else 0
                    own = slice(first, first + part.output.numel())
                    out = flat(part.output)
                    out.copy_(torch.where(bad[own], values[own].to(out.dtype), out))

        return write

    def _maximum(self, of: torch.Tensor) -> Plan:
        """Return the plan of the largest bytes of all ranks."""
        algorithm = self._request.algorithm if self._request.collective == "all_reduce" else DIRECT
        request = OpSpec("all_reduce", "max", (), algorithm, checksum=self._request.checksum)
        return self._plan_of(self._stage(request, [(of.numel(), torch.uint8)], "ranges of bits"))

    def _plan_of(self, request: OpSpec) -> Plan:
        """Return the plan of a stage, whose size may depend on the data."""
        plan = self._plans.pop(request, None)
        if plan is None:
            plan = self._prepare(request)
        self._plans[request] = plan  # the last one is the one that was used last
        if len(self._plans) > KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _stage(self, request: OpSpec, sizes: Sequence[ScratchSize], what: str) -> OpSpec:
        parts = tuple(TensorSpec(numel, dtype, NONE) for numel, dtype in sizes)
        return request._replace(parts=parts, purpose=f"{what} of {self._name}")


def _rounded_up(count: int) -> int:
    """Return ``count`` or up to a thirty-second more, so that few plans serve all counts."""
    step = 1 << max(0, count.bit_length() - 6)
    return -(-count // step) * step
