"""Starts the collectives that average one bucket: one all-reduce for codecs, several in stages for PowerSGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.codecs import codec
from dtcomm.collectives import Algorithm, Work, all_reduce_coalesced
from dtcomm.collectives._dispatch import require_algorithm
from dtcomm.collectives.group_ops import level_shares
from dtcomm.compress.bucket_layout import BucketLayout, LevelShares
from dtcomm.compress.powersgd import Factors, LowRankTask, PowerSGD, low_rank_stages
from dtcomm.compress.spec import LevelCodecs, Scheme
from dtcomm.compress.stage_scheduler import Stages

NONE = codec("none")

#: A function with the arguments of `all_reduce_coalesced`, which returns the handle of the operation.
AllReduce = Callable[..., Work | None]


def _has_levels(algorithm: Algorithm) -> bool:
    """Return whether an algorithm has a level for each of two codecs."""
    if isinstance(algorithm, str):
        return algorithm in ("direct", "auto") or algorithm.startswith("hierarchical")
    return any(transfer.level for transfer in algorithm.transfers)


class BucketAverager:
    """Averages buckets over a group.

    Args:
        algorithm: The algorithm of the all-reduce.
        group: The process group; None is the default group.
        seed: The seed of stochastic rounding; the step is added to it.
        schemes: All schemes that may be used. If one of them is a `LevelCodecs`, "direct" means "hierarchical" on
            several hosts, for every bucket: the result of a parameter does not depend on its bucket then either.
        factors: The factors of PowerSGD to continue with; None: new ones.
        all_reduce: The collective; `dtcomm.measure.simulated_ranks` passes another one.

    Raises:
        ValueError: The algorithm is not valid for the group, or it has no levels and a scheme has a codec for each.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        group: Any,
        seed: int,
        schemes: Sequence[Scheme] = (),
        factors: Factors | None = None,
        all_reduce: AllReduce = all_reduce_coalesced,
    ) -> None:
        if dist.is_initialized():
            require_algorithm(algorithm, group)
        self.seed = seed
        self.factors = factors or Factors()
        self._algorithm, self._group, self._all_reduce = algorithm, group, all_reduce
        self._level_shares: LevelShares | None = (1.0, 0.0)
        for scheme in schemes:
            if isinstance(scheme, LevelCodecs):
                self._level_shares = None  # known with the first bucket
                if not _has_levels(algorithm):
                    name = repr(algorithm) if isinstance(algorithm, str) else "this Schedule"
                    raise ValueError(
                        f"algorithm: {scheme} names a codec for each level, and {name} has no levels; valid: "
                        "direct, auto, hierarchical, hierarchical:INSIDE/BETWEEN, a Schedule with transfers of level 1"
                    )

    def level_shares(self, buffer: torch.Tensor) -> LevelShares:
        """Return `BucketLayout.level_shares`; the first call asks on how many hosts the ranks are.

        It is made on all ranks, before the collective of the first bucket.
        """
        if self._level_shares is None:
            algorithm = "hierarchical" if self._algorithm in ("direct", "auto") else self._algorithm
            self._level_shares = level_shares(algorithm, buffer, self._group)
            if self._level_shares[1] and self._algorithm == "direct":
                self._algorithm = "hierarchical"
        return self._level_shares

    def all_reduce(
        self,
        layout: BucketLayout,
        tensors: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        stats: torch.Tensor | None,
        step: int,
    ) -> Work:
        """Start averaging a bucket without PowerSGD, in one message.

        Args:
            layout: The layout of the bucket.
            tensors: The tensor to average of each segment.
            residuals: The residual of each segment, or None.
            stats: A tensor to average along with the bucket, uncompressed, or None.
            step: The step, for stochastic rounding.
        """
        codecs = layout.codecs
        if stats is not None:
            tensors, codecs, residuals = [*tensors, stats], [*codecs, NONE], [*residuals, None]
        work = self._all_reduce(
            tensors,
            "avg",
            codec=codecs,
            algorithm=self._algorithm,
            group=self._group,
            async_op=True,
            seed=self.seed + step,
            residuals=residuals,
            bucket_bytes=1 << 40,
        )
        assert work is not None  # because of async_op
        return work

    def stages(
        self,
        layout: BucketLayout,
        tensors: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        stats: torch.Tensor | None,
        step: int,
    ) -> Stages:
        """Return the stages that average any bucket, for a `StageScheduler`; the arguments are `all_reduce`'s."""
        tasks: list[LowRankTask] = []
        other_tensors: list[torch.Tensor] = []
        other_residuals: list[torch.Tensor | None] = []
        for segment, tensor, residual in zip(layout.segments, tensors, residuals, strict=True):
            if isinstance(segment.codec, PowerSGD):
                tasks.append(LowRankTask(segment.name, segment.codec, *segment.matrix, tensor, residual))
            else:
                other_tensors.append(tensor)
                other_residuals.append(residual)
        codecs = list(layout.codecs)
        if stats is not None:
            other_tensors.append(stats)
            codecs.append(NONE)
            other_residuals.append(None)
        return low_rank_stages(
            tasks,
            other_tensors,
            codecs,
            other_residuals,
            factors=self.factors,
            step=step,
            algorithm=self._algorithm,
            group=self._group,
            seed=self.seed + step,
            all_reduce=self._all_reduce,
        )
