"""Sums with codec ``exact``: the ranks agree on every block's exponent and add integers; an audit checks the sum.

docs/exact.md has the arithmetic and the argument why the audit detects every error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.codecs import Exact, Uncompressed
from dtcomm.collectives._multi_stage import (
    Check,
    MultiStagePlan,
    PrepareStage,
    Scratch,
    ScratchSize,
    Stage,
    carve,
    flat,
    shards,
)
from dtcomm.errors import PayloadCorrupt
from dtcomm.kernels import local_tasks
from dtcomm.runtime.types import Buffers, OpHooks, OpSpec, TensorSpec

NONE = Uncompressed()
# The algorithm of stages whose tensors are not the caller's: the exponents of a reduce_scatter, checksums, verdicts.
DIRECT = "direct"


class ReproducibleSum(MultiStagePlan):
    """all_reduce, reduce or reduce_scatter of tensors whose codec is ``exact``.

    Args:
        prepare: Returns the runtime's plan of a stage.
        request: The operation; all its parts have codec ``exact``.
        rank: This rank in the group.
        ranks: The number of ranks.
        audit: Whether the sum is checked; then the operation has one part.

    Raises:
        ValueError: If the integers are too narrow for so many ranks.
    """

    def __init__(
        self, prepare: PrepareStage, request: OpSpec, rank: int, ranks: int, *, audit: bool = False
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self._divisor = ranks if request.op == "avg" else 1
        self._shards = ranks if request.collective == "reduce_scatter" else 1
        self._codecs: list[Exact] = []
        for part in request.parts:
            assert isinstance(part.codec, Exact)
            part.codec.digits(ranks)
            self._codecs.append(part.codec)
        spec = "/".join(dict.fromkeys(str(codec) for codec in self._codecs))
        self._name = f"{request.collective} with codec {spec}"
        blocks = [codec.blocks(part.numel) * self._shards for codec, part in zip(self._codecs, request.parts)]
        exponents = OpSpec(
            "all_reduce",
            "max",
            tuple(TensorSpec(count, torch.uint8, NONE) for count in blocks),
            request.algorithm if request.collective == "all_reduce" else DIRECT,
            checksum=request.checksum,
            purpose=f"exponents of {spec}",
        )
        self._exponents_plan = prepare(exponents)
        codes = tuple(
            TensorSpec(part.numel, codec.code_type, NONE) for codec, part in zip(self._codecs, request.parts)
        )
        self._codes_plan = prepare(request._replace(op="sum", parts=codes, purpose=f"integers of {spec}"))
        self._scratch_sizes: list[ScratchSize] = []
        for codec, part, count in zip(self._codecs, request.parts, blocks):
            self._scratch_sizes += [(count, torch.uint8), (part.numel * self._shards, codec.code_type)]
            self._scratch_sizes += [(part.numel if self._shards > 1 else 0, codec.code_type)]
        self._audit = audit
        if audit:
            (part,) = request.parts
            runs = -(-part.numel // local_tasks.AUDIT_RUN)
            sums, verdict = TensorSpec(runs, torch.int64, NONE), TensorSpec(1, torch.int64, NONE)
            again = exponents._replace(algorithm=DIRECT, purpose=f"exponents of {spec} once more")
            self._checksums_plan = prepare(
                again._replace(op="sum", parts=(sums,), purpose=f"checksums of {spec}")
            )
            self._exponents_again_plan = prepare(again)
            self._verdict_plan = prepare(
                again._replace(op="min", parts=(verdict,), purpose=f"verdict on {spec}")
            )
            self._scratch_sizes += [(runs, torch.int64), (runs, torch.int64), (blocks[0], torch.uint8)]

    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        carved = iter(carve(scratch, self._scratch_sizes))
        measure_tasks, quantize_tasks, dequantize_arguments = [], [], []
        exponent_buffers, code_buffers = [], []
        for codec, part in zip(self._codecs, buffers, strict=True):
            exponents, codes, own_codes = next(carved), next(carved), next(carved)
            assert part.input is not None
            for x, residual, shard_exponents, shard_codes in zip(
                shards(part.input, self._shards),
                shards(part.residual, self._shards),
                shards(exponents, self._shards),
                shards(codes, self._shards),
                strict=True,
            ):
                assert x is not None and shard_exponents is not None and shard_codes is not None
                measure_tasks.append(local_tasks.measure_exponents(codec, x, residual, shard_exponents))
                quantize_tasks.append(
                    local_tasks.quantize_to_exponents(
                        codec, self._ranks, x, residual, shard_exponents, shard_codes
                    )
                )
            exponent_buffers.append(Buffers(exponents, exponents))
            summed_codes = own_codes if self._shards > 1 else codes
            code_buffers.append(Buffers(codes, None if part.output is None else summed_codes))
            if part.output is not None:
                own_exponents = shards(exponents, self._shards)[self._rank if self._shards > 1 else 0]
                assert own_exponents is not None
                dequantize_arguments.append((codec, summed_codes, own_exponents, flat(part.output)))
        if self._audit:
            return self._audited_stages(buffers[0], exponent_buffers[0], code_buffers[0], list(carved))
        dequantize_tasks = [
            local_tasks.dequantize(codec, self._ranks, codes, exponents, self._divisor, output)
            for codec, codes, exponents, output in dequantize_arguments
        ]
        return [
            Stage(self._exponents_plan, exponent_buffers, OpHooks(before=measure_tasks)),
            Stage(self._codes_plan, code_buffers, OpHooks(before=quantize_tasks, after=dequantize_tasks)),
        ], None

    def _audited_stages(
        self,
        part: Buffers,
        exponent_buffers: Buffers,
        code_buffers: Buffers,
        scratch: list[torch.Tensor],
    ) -> tuple[list[Stage], Check | None]:
        # The checksums and the second round of exponents travel apart from what they check.
        (codec,), (checksums, result_checksums, exponents_again) = self._codecs, scratch
        exponents, codes, x = exponent_buffers.input, code_buffers.input, part.input
        assert exponents is not None and codes is not None and x is not None and part.output is not None
        x, residual = flat(x), None if part.residual is None else flat(part.residual)
        # The verdict is read after the call, so it must not be in scratch memory.
        verdict = x.new_empty(1, dtype=torch.int64)
        measure_tasks = [
            local_tasks.measure_exponents(codec, x, residual, output)
            for output in (exponents, exponents_again)
        ]
        quantize_tasks = [
            local_tasks.quantize_to_exponents(codec, self._ranks, x, residual, exponents, codes),
            local_tasks.audit_checksums(codec, codes, checksums),
        ]
        verdict_task = local_tasks.audit_verdict(
            codec, x.numel(), checksums, result_checksums, exponents, exponents_again, verdict
        )
        dequantize_task = local_tasks.dequantize(
            codec, self._ranks, codes, exponents, self._divisor, flat(part.output), verdict
        )
        result_checksums_task = local_tasks.audit_checksums(codec, codes, result_checksums)
        numel = x.numel()

        def check() -> None:
            if int(verdict) != local_tasks.AUDIT_OK:
                raise PayloadCorrupt(self._describe_failure(int(verdict), numel))

        return [
            Stage(self._exponents_plan, [exponent_buffers], OpHooks(before=measure_tasks)),
            Stage(self._codes_plan, [code_buffers], OpHooks(before=quantize_tasks)),
            Stage(
                self._checksums_plan, [Buffers(checksums, checksums)], OpHooks(before=[result_checksums_task])
            ),
            Stage(self._exponents_again_plan, [Buffers(exponents_again, exponents_again)], OpHooks()),
            Stage(
                self._verdict_plan,
                [Buffers(verdict, verdict)],
                OpHooks(before=[verdict_task], after=[dequantize_task]),
            ),
        ], check

    def _describe_failure(self, verdict: int, numel: int) -> str:
        run, kind = divmod(verdict, 2)
        if not 0 <= run * local_tasks.AUDIT_RUN < numel:
            return f"rank {self._rank}: audit of {self._name}: a bit of the verdict changed in transit"
        first, last = run * local_tasks.AUDIT_RUN, min(numel, (run + 1) * local_tasks.AUDIT_RUN) - 1
        finding = (
            "the ranks do not agree on the exponents"
            if kind
            else "the ranks' checksums do not add up to the result's"
        )
        return (
            f"rank {self._rank}: audit of {self._name}: {finding} of elements {first} to {last}: "
            "an addition was wrong or a bit changed in transit; the tensor is unchanged"
        )
