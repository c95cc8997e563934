"""What "auto" measures in its first steps: buckets, samples of their gradients, the link, the kernels."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dtcomm.compress.autotune_model import BucketProfile, LinkCosts
from dtcomm.compress.kernel_costs import SAMPLE, kernel_seconds, relative_error
from dtcomm.compress.policy import SMALL
from dtcomm.compress.spec import Scheme, matrix_shape
from dtcomm.ddp.rank_agreement import Consensus


@dataclass(frozen=True)
class BucketTiming:
    """One bucket of a step: when it was ready, seconds after the first, how long it was under way, bytes sent."""

    ready: float
    took: float
    sent: int


@dataclass(frozen=True)
class BucketInfo:
    """One bucket's gradients: shapes of the matrices, elements of the rest, rows of the largest matrix."""

    names: list[str]
    matrices: tuple[tuple[int, int], ...]
    rest: int
    sample: torch.Tensor
    dtype: torch.dtype

    def error(self, chosen: Scheme) -> float:
        """Of one encoding of the sample."""
        return relative_error(chosen, self.sample) if self.sample.numel() else 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """The same on all ranks: ``link`` is seconds a byte of the probe alone, ``plain`` those of a step."""

    costs: LinkCosts
    loads: list[BucketProfile]
    errors: Mapping[Scheme, float]
    link: float
    plain: float


class Measurements:
    """One rank's."""

    def __init__(self) -> None:
        self._steps: list[Sequence[BucketTiming]] = []
        self._seen: dict[int, BucketInfo] = {}

    def add(self, buckets: Sequence[BucketTiming]) -> None:
        """The buckets of one step."""
        self._steps.append(buckets)

    def look(self, index: int, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """A bucket before it is reduced."""
        shapes, rest = [], 0
        largest = torch.empty(0, 0)
        for gradient in gradients:
            if gradient.ndim < 2 or gradient.numel() < SMALL:
                rest += gradient.numel()
                continue
            shapes.append(matrix_shape(gradient))
            if gradient.numel() > largest.numel():
                largest = gradient
        rows, columns = matrix_shape(largest)
        some = largest.reshape(rows, columns)[: max(1, SAMPLE // max(1, columns))]
        sample = some.detach().cpu().clone()
        self._seen[index] = BucketInfo(list(names), tuple(shapes), rest, sample, gradients[0].dtype)

    def names(self) -> list[list[str]]:
        """Of the parameters in each bucket."""
        return [self._seen[index].names for index in sorted(self._seen)]

    def agree(self, consensus: Consensus, schemes: Sequence[Scheme], plain: float) -> MeasuredCosts:
        """What all ranks decide by, the largest of their figures; ``plain``: this rank's seconds of a step."""
        seen = [self._seen[index] for index in sorted(self._seen)]
        latency, alone = consensus.probe()
        steps = [each for each in self._steps if len(each) == len(seen)]
        buckets = [
            BucketTiming(
                statistics.median(each.ready for each in column),
                min(each.took for each in column),
                column[0].sent,
            )
            for column in zip(*steps, strict=True)
        ] or [BucketTiming(0.0, 0.0, 0)] * len(seen)
        most = max(buckets, key=lambda each: each.sent, default=BucketTiming(0.0, 0.0, 0))
        # Buckets come while backward computes, the probe comes alone: what is slower than both is neither's link.
        per_byte = alone
        if most.sent and most.took > latency:
            per_byte = min(alone, (most.took - latency) / most.sent)
        mine = [
            latency,
            alone,
            per_byte,
            plain,
            float(consensus.cpu_oversubscribed()),
            *(each.ready for each in buckets),
        ]
        for chosen in schemes:
            error = max((one.error(chosen) for one in seen), default=0.0)
            mine += [*kernel_seconds(chosen, device=consensus.device), error]
        latency, alone, per_byte, plain, busy, *rest = consensus.agree(mine)
        ready, figures = rest[: len(seen)], rest[len(seen) :]
        work = {each: (figures[3 * at], figures[3 * at + 1]) for at, each in enumerate(schemes)}
        return MeasuredCosts(
            costs=LinkCosts(
                ranks=consensus.ranks,
                latency=latency,
                per_byte=per_byte,
                work=work,
                cpu_oversubscribed=bool(busy),
            ),
            loads=[
                BucketProfile(ready=at, matrices=one.matrices, rest=one.rest, dtype=one.dtype)
                for at, one in zip(ready, seen, strict=True)
            ],
            errors={each: figures[3 * at + 2] for at, each in enumerate(schemes)},
            link=alone,
            plain=plain,
        )
