"""One packed message on its way: its codecs in one collective, its compressors in stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm.codecs import Codec, codec
from dtcomm.collectives import Work, all_reduce_coalesced
from dtcomm.compress.bucket_layout import Packing
from dtcomm.compress.powersgd import Factors, PowerSGD, Task, stages
from dtcomm.compress.stage_scheduler import Stages

NONE = codec("none")

#: Takes the arguments of `all_reduce_coalesced` and returns its handle.
Reduce = Callable[..., Work | None]


class Averager:
    """Averages packings over a group: with `reduce`, by default the collective, and the `factors` of PowerSGD."""

    def __init__(
        self,
        algorithm: str,
        group: Any,
        seed: int,
        factors: Factors | None = None,
        reduce: Reduce = all_reduce_coalesced,
    ) -> None:
        self.seed = seed
        self.factors = factors or Factors()
        self._algorithm, self._group, self._reduce = algorithm, group, reduce

    def start(
        self,
        packing: Packing,
        tensors: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        told: torch.Tensor | None,
        step: int,
    ) -> Work:
        """A packing without PowerSGD. `tensors` and `residuals` are the segments', `told` goes along uncompressed."""
        more = [] if told is None else [told]
        work = self._reduce(
            [*tensors, *more],
            "avg",
            codec=[*packing.codecs, *(NONE for _ in more)],
            algorithm=self._algorithm,
            group=self._group,
            async_op=True,
            seed=self.seed + step,
            residuals=[*residuals, *(None for _ in more)],
            bucket_bytes=1 << 40,
        )
        assert work is not None  # it is with async_op
        return work

    def stages(
        self,
        packing: Packing,
        tensors: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        told: torch.Tensor | None,
        step: int,
    ) -> Stages:
        """Any packing, as stages for a `Sequencer`."""
        tasks: list[Task] = []
        others: list[torch.Tensor] = []
        kept: list[torch.Tensor | None] = []
        for segment, tensor, residual in zip(packing.segments, tensors, residuals, strict=True):
            if isinstance(segment.codec, PowerSGD):
                tasks.append(Task(segment.name, segment.codec, *segment.matrix, tensor, residual))
            else:
                others.append(tensor)
                kept.append(residual)
        codecs: list[Codec] = list(packing.codecs)
        if told is not None:
            others.append(told)
            codecs.append(NONE)
            kept.append(None)
        return stages(
            tasks,
            others,
            codecs,
            kept,
            factors=self.factors,
            step=step,
            algorithm=self._algorithm,
            group=self._group,
            seed=self.seed + step,
            reduce=self._reduce,
        )
