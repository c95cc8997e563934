"""Correctly rounded sums: codec ``exact:rounded=true``.

The ranks agree on the range of bits of each block, and then on how many digits the sum takes, which depends on the
data. So a call runs the agreement to its end when it is issued; its other stages are queued like those of other
multi-stage sums. docs/how-it-works/exact-sums.md describes the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.codecs.cast import RoundedExact
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
from dtcomm.runtime.types import Buffers, OpHooks, OpSpec, Plan, TensorSpec

KEPT_PLANS = 64  # of sums that take other numbers of digits


class RoundedSum(MultiStagePlan):
    """all_reduce, reduce or reduce_scatter of tensors whose codec is ``exact:rounded=true``.

    ``prepare`` returns the runtime's plan of a stage.
    """

    def __init__(self, prepare: PrepareStage, request: OpSpec, rank: int, ranks: int) -> None:
        self._prepare, self._request = prepare, request
        self._rank, self._ranks = rank, ranks
        self._divisor = ranks if request.op == "avg" else 1
        self._shards = ranks if request.collective == "reduce_scatter" else 1
        self._own = rank if self._shards > 1 else 0
        self._codecs: list[RoundedExact] = []
        for part in request.parts:
            assert isinstance(part.codec, RoundedExact)
            self._codecs.append(part.codec)
        self._name = "/".join(dict.fromkeys(map(str, self._codecs)))
        self._blocks = [codec.blocks(part.numel) for codec, part in zip(self._codecs, request.parts)]
        first = tuple(TensorSpec(part.numel, torch.int32, NONE) for part in request.parts)
        self._first_plan = prepare(self._sum_of(first, "first digits"))
        self._plans: dict[tuple[str, int], Plan] = {}

    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        if any(part.residual is not None for part in buffers):
            raise ValueError(f"residual: {self._name} loses nothing that a residual could keep; valid: None")
        inputs = [split(part.input, self._shards) for part in buffers]
        numels = [part.numel for part in self._request.parts]
        shards = [  # in the order in which their ranges of bits, and their digits, follow each other
            (codec, x, blocks)
            for shard in range(self._shards)
            for codec, parts, blocks in zip(self._codecs, inputs, self._blocks, strict=True)
            if (x := parts[shard]) is not None
        ]
        ranges = torch.empty(2 * self._shards * sum(self._blocks), dtype=torch.uint8)
        tops, lows = (
            list(torch.split(half, [blocks for _, _, blocks in shards])) for half in ranges.chunk(2)
        )
        counts = self._agree(shards, ranges, tops, lows, seed, finite_only=False)
        check = None
        finite = all(of_finite for *_, of_finite in counts)
        if not finite:
            check = self._agree_on_non_finite(buffers, seed)
            counts = self._agree(shards, ranges, tops, lows, seed, finite_only=True)
        bits = 31 - (self._ranks - 1).bit_length()
        planes = max((-(-span // bits) - 1 for _, wide, span, _ in counts if wide), default=0)
        elements = [
            (middle * codec.block, wide * codec.block * planes)
            for (middle, wide, _, _), (codec, _, _) in zip(counts, shards, strict=True)
        ]
        parts = len(self._codecs)
        rows = [elements[i : i + parts] for i in range(0, len(elements), parts)]  # one for each shard
        middle_size, wide_size = (
            _rounded_up(max(sum(pair[k] for pair in row) for row in rows)) for k in (0, 1)
        )

        own = self._shards > 1
        sizes: list[ScratchSize] = [(numel * self._shards, torch.int32) for numel in numels]
        sizes += [(numel if own else 0, torch.int32) for numel in numels]
        for size, dtype in ((middle_size, torch.int16), (wide_size, torch.int32)):
            sizes += [(size * self._shards, dtype), (size if own else 0, dtype)]
        *firsts, middle, own_middle, wide, own_wide = carve(scratch, sizes)
        firsts, own_firsts = firsts[:parts], firsts[parts:]
        agreed = [
            local_tasks.SumRange(codec=codec, ranks=self._ranks, wide=planes, tops=top, lows=low)
            for (codec, _, _), top, low in zip(shards, tops, lows, strict=True)
        ]
        split_tasks, round_tasks = [], []
        for shard, row in enumerate(rows):
            at_middle, at_wide = shard * middle_size, shard * wide_size
            for i, (middle_count, wide_count) in enumerate(row):
                _, x, _ = shards[shard * parts + i]
                digits = firsts[i][shard * numels[i] : (shard + 1) * numels[i]]
                split_tasks.append(
                    local_tasks.split_digits(
                        agreed[shard * parts + i],
                        x,
                        finite,
                        digits,
                        middle[at_middle : at_middle + middle_count],
                        wide[at_wide : at_wide + wide_count],
                    )
                )
                at_middle, at_wide = at_middle + middle_count, at_wide + wide_count
            middle[at_middle : (shard + 1) * middle_size].zero_()
            wide[at_wide : (shard + 1) * wide_size].zero_()
        sums = (own_firsts, own_middle, own_wide) if own else (firsts, middle, wide)
        at_middle = at_wide = 0
        for i, (middle_count, wide_count) in enumerate(rows[self._own]):
            output = buffers[i].output
            if output is not None:
                round_tasks.append(
                    local_tasks.round_digits(
                        agreed[self._own * parts + i],
                        sums[0][i],
                        sums[1][at_middle : at_middle + middle_count],
                        sums[2][at_wide : at_wide + wide_count],
                        self._divisor,
                        flat(output),
                    )
                )
            at_middle, at_wide = at_middle + middle_count, at_wide + wide_count

        has_output = bool(round_tasks)
        stages = [
            (
                self._first_plan,
                [Buffers(x, y if has_output else None) for x, y in zip(firsts, sums[0], strict=True)],
            )
        ]
        for name, size, x, y in (
            ("middle", middle_size, middle, sums[1]),
            ("wide", wide_size, wide, sums[2]),
        ):
            if size:
                stages.append((self._plan_of(name, size, x.dtype), [Buffers(x, y if has_output else None)]))
        last = len(stages) - 1
        return [
            Stage(
                plan,
                tensors,
                OpHooks(before=split_tasks if i == 0 else (), after=round_tasks if i == last else ()),
            )
            for i, (plan, tensors) in enumerate(stages)
        ], check

    def _agree(
        self,
        shards: Sequence[tuple[RoundedExact, torch.Tensor, int]],
        ranges: torch.Tensor,
        tops: Sequence[torch.Tensor],
        lows: Sequence[torch.Tensor],
        seed: int,
        *,
        finite_only: bool,
    ) -> list[tuple[int, int, int, bool]]:
        """Make ``ranges`` the ranges of bits of all ranks; return what `count_digits` does for each shard."""
        measure_tasks = [
            local_tasks.measure_digits(codec, x, top, low, finite_only)
            for (codec, x, _), top, low in zip(shards, tops, lows, strict=True)
        ]
        plan = self._plan_of("ranges", ranges.numel(), torch.uint8)
        plan.run([Buffers(ranges, ranges)], seed, OpHooks(before=measure_tasks))
        return [local_tasks.count_digits(self._ranks, top, low) for top, low in zip(tops, lows, strict=True)]

    def _agree_on_non_finite(self, buffers: Sequence[Buffers], seed: int) -> Check:
        """Return what writes the sums that are Inf or NaN: those of the floating-point standard, in any order."""
        inputs = [flat(part.input) for part in buffers if part.input is not None]
        x = torch.cat([tensor.float() for tensor in inputs])
        nan = x.isnan()
        seen = torch.stack([(x == torch.inf) | nan, (x == -torch.inf) | nan]).to(torch.uint8)
        plan = self._plan_of("ranges", seen.numel(), torch.uint8)
        plan.run([Buffers(seen.view(-1), seen.view(-1))], seed, None)
        upper, lower = seen.bool()
        value = torch.where(upper & lower, torch.nan, torch.where(upper, torch.inf, -torch.inf))
        numels = [tensor.numel() for tensor in inputs]

        def write() -> None:
            for part, values, bad in zip(
                buffers, torch.split(value, numels), torch.split(upper | lower, numels), strict=True
            ):
                if part.output is not None:
                    own = slice(self._own * part.output.numel(), (self._own + 1) * part.output.numel())
                    out = flat(part.output)
                    out.copy_(torch.where(bad[own], values[own].to(out.dtype), out))

        return write

    def _plan_of(self, name: str, size: int, dtype: torch.dtype) -> Plan:
        """Return the plan of a stage whose size depends on the data."""
        plan = self._plans.pop((name, size), None)
        if plan is None:
            parts = (TensorSpec(size, dtype, NONE),)
            if name == "ranges":
                algorithm = self._request.algorithm if self._request.collective == "all_reduce" else DIRECT
                request = OpSpec(
                    "all_reduce",
                    "max",
                    parts,
                    algorithm,
                    checksum=self._request.checksum,
                    purpose=f"ranges of bits of {self._name}",
                )
            else:
                request = self._sum_of(parts, f"{name} digits")
            plan = self._prepare(request)
        self._plans[name, size] = plan  # the last one is the one that was used last
        if len(self._plans) > KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _sum_of(self, parts: tuple[TensorSpec, ...], what: str) -> OpSpec:
        return self._request._replace(op="sum", parts=parts, purpose=f"{what} of {self._name}")


def _rounded_up(count: int) -> int:
    """Return ``count`` or up to a sixteenth more, so that few plans serve all counts."""
    step = 1 << max(0, count.bit_length() - 5)
    return -(-count // step) * step
