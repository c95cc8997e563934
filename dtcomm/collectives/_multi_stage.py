"""Reductions that need a preparation collective before the sum: codecs ``exact`` and ``randk:positions=shared``.

Such a codec makes the contributions of all ranks comparable first (shared exponents, or shared random positions), so
that the messages add them without loss. The call consists of one or more ordinary operations (*stages*), each with a
schedule and a codec of its own, and of tasks that every rank runs before and after them. The stages of one call are
queued together, so that no other operation comes between them, asynchronous or not.

`_dispatch` makes and starts the plans.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dtcomm.codecs import Exact, RandK, Uncompressed
from dtcomm.errors import PayloadCorrupt
from dtcomm.kernels import local_tasks
from dtcomm.runtime.types import Buffers, OpHooks, OpSpec, Plan, TensorSpec

ALIGNMENT = 64
NONE = Uncompressed()
# The algorithm of stages whose tensors are not the caller's: the exponents of a reduce_scatter, checksums, verdicts.
DIRECT = "direct"
ScratchSize = tuple[int, torch.dtype]  # elements and their type
Scratch = Callable[[int], torch.Tensor]  # returns at least that many bytes
PrepareStage = Callable[[OpSpec], Plan]  # returns the runtime's plan of a stage
Check = Callable[[], None]


class Stage(NamedTuple):
    """One operation of a call."""

    plan: Plan
    buffers: Sequence[Buffers]
    hooks: OpHooks


class MultiStagePlan(abc.ABC):
    """The plan of a reduction whose ranks agree on a representation before they add."""

    @abc.abstractmethod
    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        """Return the operations of a call, and a function to call when they are done, which may raise."""


class SplitPlan(MultiStagePlan):
    """A plan for parts that need different plans: ``plans`` are (indices of the parts, their plan)."""

    def __init__(self, plans: Sequence[tuple[Sequence[int], MultiStagePlan]]) -> None:
        self._plans = plans

    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        stages: list[Stage] = []
        checks: list[Check] = []
        for indices, plan in self._plans:
            more, check = plan.stages([buffers[i] for i in indices], seed, scratch)
            stages += more
            checks += [] if check is None else [check]

        def check_all() -> None:
            for check in checks:
                check()

        return stages, check_all if checks else None


class ReproducibleSum(MultiStagePlan):
    """all_reduce, reduce or reduce_scatter of tensors whose codec is ``exact``.

    The ranks agree on every block's exponent and then add integers. docs/how-it-works/exact-sums.md describes the
    arithmetic, and why the audit detects every error. ``prepare`` returns the runtime's plan of a stage. ``request``
    has one part if the sum is audited. ValueError if the integers are too narrow for so many ranks.
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
                split(part.input, self._shards),
                split(part.residual, self._shards),
                split(exponents, self._shards),
                split(codes, self._shards),
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
                own_exponents = split(exponents, self._shards)[self._rank if self._shards > 1 else 0]
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
        # The checksums and the second round of exponents are sent apart from what they check.
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


class SharedRandKSum(MultiStagePlan):
    """all_reduce, reduce or reduce_scatter of tensors of which at least one has shared random positions.

    ``prepare`` returns the runtime's plan of the stage. Parts with other codecs are sent in the same message unchanged.
    """

    def __init__(self, prepare: PrepareStage, request: OpSpec, rank: int, ranks: int) -> None:
        self._rank = rank
        self._shards = ranks if request.collective == "reduce_scatter" else 1
        self._parts = request.parts
        parts, specs = [], []
        self._scratch_sizes: list[ScratchSize] = []
        for part in request.parts:
            codec = part.codec
            if not isinstance(codec, RandK) or not codec.needs_agreement:
                parts.append(part)
                continue
            kept = codec.kept_in(part.numel)
            parts.append(TensorSpec(kept, torch.float32, codec.value_codec()))
            specs.append(str(codec))
            self._scratch_sizes += [(kept * self._shards, torch.float32)] * 2
            self._scratch_sizes += [(kept if self._shards > 1 else 0, torch.float32)]
        purpose = f"values of {'/'.join(dict.fromkeys(specs))}"
        self._plan = prepare(request._replace(parts=tuple(parts), purpose=purpose))

    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        key = local_tasks.shared_key(seed)
        carved = iter(carve(scratch, self._scratch_sizes))
        before, after, stage_buffers = [], [], []
        for part, tensors in zip(self._parts, buffers, strict=True):
            codec = part.codec
            if not isinstance(codec, RandK) or not codec.needs_agreement:
                stage_buffers.append(tensors)
                continue
            values, errors, own_values = next(carved), next(carved), next(carved)
            for shard, (x, residual, shard_values, shard_errors) in enumerate(
                zip(
                    split(tensors.input, self._shards),
                    split(tensors.residual, self._shards),
                    split(values, self._shards),
                    split(errors, self._shards),
                    strict=True,
                )
            ):
                assert x is not None and shard_values is not None and shard_errors is not None
                offset = shard * part.numel
                before.append(
                    local_tasks.gather_values(codec, key, offset, x, residual, shard_values, shard_errors)
                )
                if residual is not None:
                    after.append(local_tasks.restore_residual(codec, key, offset, shard_errors, residual))
            output = None if tensors.output is None else own_values if self._shards > 1 else values
            if tensors.output is not None and output is not None:
                offset = self._rank * part.numel if self._shards > 1 else 0
                (out,) = split(tensors.output, 1)
                assert out is not None
                scaled = tensors.residual is None
                after.append(local_tasks.scatter_values(codec, key, offset, scaled, output, out))
            stage_buffers.append(Buffers(values, output, None if tensors.residual is None else errors))
        # With a residual the sum is written as it is, without one it is scaled: all ranks must do the same.
        agreed = local_tasks.consistency_key(key, [part.residual is not None for part in buffers])
        return [Stage(self._plan, stage_buffers, OpHooks(before, after, agreed))], None


def carve(scratch: Scratch, sizes: Sequence[ScratchSize]) -> list[torch.Tensor]:
    """Return a tensor for each of ``sizes``, one behind the other in the communicator's scratch memory."""
    nbytes = [-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, dtype in sizes]
    memory, offset, tensors = scratch(sum(nbytes)), 0, []
    for (count, dtype), padded in zip(sizes, nbytes, strict=True):
        tensors.append(memory[offset : offset + count * dtype.itemsize].view(dtype))
        offset += padded
    return tensors


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as one dimension in memory order, whatever its strides."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def split(tensor: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    """Return ``count`` equal parts of a tensor; None for each if there is no tensor."""
    if tensor is None:
        return [None] * count
    numel = tensor.numel() // count
    return [flat(tensor)[i * numel : (i + 1) * numel] for i in range(count)]
