"""Sums with ``exact``: agree on every block's exponent, add integers, and audit the sum where that is asked for.

docs/guides/reproducible-sums.md has the arithmetic and says why the audit misses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.codecs import Exact, Uncompressed
from dtcomm.collectives._multi_stage import (
    Check,
    Make,
    Message,
    MultiStagePlan,
    Room,
    Scratch,
    Stage,
    carve,
    flat,
    shards,
)
from dtcomm.errors import PayloadCorrupt
from dtcomm.kernels import local_tasks
from dtcomm.runtime.types import Buffers, OpHooks, TensorSpec

NONE = Uncompressed()
# Of what is no chunk of the caller's tensor: exponents of a reduce_scatter, checksums, verdicts.
DIRECT = "direct"


class ExactSum(MultiStagePlan):
    """all_reduce, reduce or reduce_scatter of tensors whose codec is ``exact``; ``rank`` is this one.

    Raises ValueError where the integers have no room for so many ranks.
    """

    def __init__(
        self,
        make: Make,
        message: Message,
        rank: int,
        ranks: int,
        *,
        audit: bool = False,
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self._divisor = ranks if message.op == "avg" else 1
        self._shards = ranks if message.collective == "reduce_scatter" else 1
        self._parts = message.parts
        self._codecs: list[Exact] = []
        for part in message.parts:
            assert isinstance(part.codec, Exact)
            part.codec.digits(ranks)
            self._codecs.append(part.codec)
        everybody = message.collective == "all_reduce"
        spec = "/".join(dict.fromkeys(str(codec) for codec in self._codecs))
        self._name = f"{message.collective} with codec {spec}"
        blocks = [codec.blocks(part.numel) * self._shards for codec, part in zip(self._codecs, self._parts)]
        agreement = Message(
            "all_reduce",
            "max",
            tuple(TensorSpec(count, torch.uint8, NONE) for count in blocks),
            message.algorithm if everybody else DIRECT,
            0,
            f"exponents of {spec}",
            message.checksum,
        )
        self._agreement = make(agreement)
        codes = tuple(
            TensorSpec(part.numel, codec.code_type, NONE) for codec, part in zip(self._codecs, self._parts)
        )
        self._integers = make(message._replace(op="sum", parts=codes, purpose=f"integers of {spec}"))
        self._rooms: list[Room] = []
        for codec, part, count in zip(self._codecs, self._parts, blocks):
            self._rooms += [(count, torch.uint8), (part.numel * self._shards, codec.code_type)]
            self._rooms += [(part.numel if self._shards > 1 else 0, codec.code_type)]
        self._audits = audit
        if audit:
            (part,) = self._parts
            runs = -(-part.numel // local_tasks.AUDIT_RUN)
            sums, verdict = TensorSpec(runs, torch.int64, NONE), TensorSpec(1, torch.int64, NONE)
            once_more = agreement._replace(algorithm=DIRECT, purpose=f"exponents of {spec} once more")
            self._sums = make(once_more._replace(op="sum", parts=(sums,), purpose=f"checksums of {spec}"))
            self._again = make(once_more)
            self._verdict = make(once_more._replace(op="min", parts=(verdict,), purpose=f"verdict on {spec}"))
            self._rooms += [(runs, torch.int64), (runs, torch.int64), (blocks[0], torch.uint8)]

    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        carved = iter(carve(scratch, self._rooms))
        measures, puts, takes, grids, integers = [], [], [], [], []
        for codec, part in zip(self._codecs, buffers, strict=True):
            exponents, codes, own = next(carved), next(carved), next(carved)
            assert part.input is not None
            pieces = zip(
                shards(part.input, self._shards),
                shards(part.residual, self._shards),
                shards(exponents, self._shards),
                shards(codes, self._shards),
                strict=True,
            )
            for x, residual, grid, integer in pieces:
                assert x is not None and grid is not None and integer is not None
                measures.append(local_tasks.measure_exponents(codec, x, residual, grid))
                puts.append(local_tasks.quantize_to_exponents(codec, self._ranks, x, residual, grid, integer))
            grids.append(Buffers(exponents, exponents))
            output = own if self._shards > 1 else codes
            integers.append(Buffers(codes, None if part.output is None else output))
            if part.output is not None:
                grid = shards(exponents, self._shards)[self._rank if self._shards > 1 else 0]
                assert grid is not None
                takes.append((codec, output, grid, flat(part.output)))
        if self._audits:
            return self._audited(buffers[0], grids[0], integers[0], list(carved))
        results = [local_tasks.dequantize(c, self._ranks, q, e, self._divisor, out) for c, q, e, out in takes]
        return [
            Stage(self._agreement, grids, OpHooks(before=measures)),
            Stage(self._integers, integers, OpHooks(before=puts, after=results)),
        ], None

    def _audited(
        self, part: Buffers, grid: Buffers, integer: Buffers, rooms: list[torch.Tensor]
    ) -> tuple[list[Stage], Check | None]:
        # The checksums and the second round of exponents travel apart from what they check.
        (codec,), (sums, found, again) = self._codecs, rooms
        exponents, codes, x = grid.input, integer.input, part.input
        assert exponents is not None and codes is not None and x is not None and part.output is not None
        x, residual = flat(x), None if part.residual is None else flat(part.residual)
        verdict = x.new_empty(1, dtype=torch.int64)  # read after the call, so it is this call's own
        measures = [local_tasks.measure_exponents(codec, x, residual, each) for each in (exponents, again)]
        puts = [
            local_tasks.quantize_to_exponents(codec, self._ranks, x, residual, exponents, codes),
            local_tasks.audit_checksums(codec, codes, sums),
        ]
        judge = local_tasks.audit_verdict(codec, x.numel(), sums, found, exponents, again, verdict)
        take = local_tasks.dequantize(
            codec, self._ranks, codes, exponents, self._divisor, flat(part.output), verdict
        )
        numel = x.numel()

        def check() -> None:
            if int(verdict) != local_tasks.AUDIT_OK:
                raise PayloadCorrupt(self._accuse(int(verdict), numel))

        return [
            Stage(self._agreement, [grid], OpHooks(before=measures)),
            Stage(self._integers, [integer], OpHooks(before=puts)),
            Stage(
                self._sums,
                [Buffers(sums, sums)],
                OpHooks(before=[local_tasks.audit_checksums(codec, codes, found)]),
            ),
            Stage(self._again, [Buffers(again, again)], OpHooks()),
            Stage(self._verdict, [Buffers(verdict, verdict)], OpHooks(before=[judge], after=[take])),
        ], check

    def _accuse(self, verdict: int, numel: int) -> str:
        run, kind = divmod(verdict, 2)
        if not 0 <= run * local_tasks.AUDIT_RUN < numel:
            return f"rank {self._rank}: audit of {self._name}: a bit changed in the verdict on its way"
        first, last = run * local_tasks.AUDIT_RUN, min(numel, (run + 1) * local_tasks.AUDIT_RUN) - 1
        what = (
            "the ranks do not agree on the exponents"
            if kind
            else "the ranks' checksums do not add up to the result's"
        )
        return (
            f"rank {self._rank}: audit of {self._name}: {what} of elements {first} to {last}: "
            "an addition was wrong or a bit changed on its way; the tensor is as it was"
        )
