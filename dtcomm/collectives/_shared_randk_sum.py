"""Sums with ``randk:positions=shared``: all ranks draw the same positions, and the values there are added in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.codecs import RandK
from dtcomm.collectives._multi_stage import (
    Check,
    Make,
    Message,
    MultiStagePlan,
    Room,
    Scratch,
    Stage,
    carve,
    shards,
)
from dtcomm.kernels import local_tasks
from dtcomm.runtime.types import Buffers, OpHooks, TensorSpec


class SharedSum(MultiStagePlan):
    """all_reduce, reduce or reduce_scatter of tensors of which some draw shared positions."""

    def __init__(self, make: Make, message: Message, rank: int, ranks: int) -> None:
        self._rank = rank
        self._shards = ranks if message.collective == "reduce_scatter" else 1
        self._parts = message.parts
        parts, specs = [], []
        self._rooms: list[Room] = []
        for part in message.parts:
            codec = part.codec
            if not isinstance(codec, RandK) or not codec.needs_agreement:
                parts.append(part)
                continue
            kept = codec.kept_in(part.numel)
            parts.append(TensorSpec(kept, torch.float32, codec.value_codec()))
            specs.append(str(codec))
            self._rooms += [(kept * self._shards, torch.float32)] * 2
            self._rooms += [(kept if self._shards > 1 else 0, torch.float32)]
        purpose = f"values of {'/'.join(dict.fromkeys(specs))}"
        self._plan = make(message._replace(parts=tuple(parts), purpose=purpose))

    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        key = local_tasks.shared_key(seed)
        carved = iter(carve(scratch, self._rooms))
        before, after, messages = [], [], []
        for part, given in zip(self._parts, buffers, strict=True):
            codec = part.codec
            if not isinstance(codec, RandK) or not codec.needs_agreement:
                messages.append(given)
                continue
            values, owed, own = next(carved), next(carved), next(carved)
            pieces = zip(
                shards(given.input, self._shards),
                shards(given.residual, self._shards),
                shards(values, self._shards),
                shards(owed, self._shards),
                strict=True,
            )
            for shard, (x, residual, value, debt) in enumerate(pieces):
                assert x is not None and value is not None and debt is not None
                offset = shard * part.numel
                before.append(local_tasks.gather_values(codec, key, offset, x, residual, value, debt))
                if residual is not None:
                    after.append(local_tasks.restore_residual(codec, key, offset, debt, residual))
            output = None if given.output is None else own if self._shards > 1 else values
            if given.output is not None and output is not None:
                offset = self._rank * part.numel if self._shards > 1 else 0
                (out,) = shards(given.output, 1)
                assert out is not None
                scaled = given.residual is None
                after.append(local_tasks.scatter_values(codec, key, offset, scaled, output, out))
            messages.append(Buffers(values, output, None if given.residual is None else owed))
        # Ranks that keep what they do not send get the sum as it is, others get it scaled: all must do alike.
        agreed = local_tasks.consistency_key(key, [part.residual is not None for part in buffers])
        return [Stage(self._plan, messages, OpHooks(before, after, agreed))], None
