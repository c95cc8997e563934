"""Sums with ``randk:positions=shared``: all ranks draw the same random positions, and add only the values there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.codecs import RandK
from dtcomm.collectives._multi_stage import (
    Check,
    MultiStagePlan,
    PrepareStage,
    Scratch,
    ScratchSize,
    Stage,
    carve,
    shards,
)
from dtcomm.kernels import local_tasks
from dtcomm.runtime.types import Buffers, OpHooks, OpSpec, TensorSpec


class SharedRandKSum(MultiStagePlan):
    """all_reduce, reduce or reduce_scatter of tensors of which at least one has shared random positions.

    Args:
        prepare: Returns the runtime's plan of the stage.
        request: The operation; parts with other codecs travel in the same message unchanged.
        rank: This rank in the group.
        ranks: The number of ranks.
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
                    shards(tensors.input, self._shards),
                    shards(tensors.residual, self._shards),
                    shards(values, self._shards),
                    shards(errors, self._shards),
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
                (out,) = shards(tensors.output, 1)
                assert out is not None
                scaled = tensors.residual is None
                after.append(local_tasks.scatter_values(codec, key, offset, scaled, output, out))
            stage_buffers.append(Buffers(values, output, None if tensors.residual is None else errors))
        # With a residual the sum is written as it is, without one it is scaled: all ranks must do the same.
        agreed = local_tasks.consistency_key(key, [part.residual is not None for part in buffers])
        return [Stage(self._plan, stage_buffers, OpHooks(before, after, agreed))], None
