"""What "auto" measures in its first steps: buckets, samples of their gradients, the link, the kernels."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dtcomm.compress.autotune_model import Costs, Load
from dtcomm.compress.kernel_costs import SAMPLE, kernel_seconds, relative_error
from dtcomm.compress.policy import SMALL
from dtcomm.compress.spec import Scheme, matrix_of
from dtcomm.ddp.rank_agreement import Meet


@dataclass(frozen=True)
class Timed:
    """One bucket of a step: when it was ready, seconds after the first, how long it was under way, bytes sent."""

    ready: float
    took: float
    sent: int


@dataclass(frozen=True)
class Seen:
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
class Agreed:
    """The same on all ranks: ``link`` is seconds a byte of the probe alone, ``plain`` those of a step."""

    costs: Costs
    loads: list[Load]
    errors: Mapping[Scheme, float]
    link: float
    plain: float


class Figures:
    """One rank's."""

    def __init__(self) -> None:
        self._steps: list[Sequence[Timed]] = []
        self._seen: dict[int, Seen] = {}

    def add(self, buckets: Sequence[Timed]) -> None:
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
            shapes.append(matrix_of(gradient))
            if gradient.numel() > largest.numel():
                largest = gradient
        rows, columns = matrix_of(largest)
        some = largest.reshape(rows, columns)[: max(1, SAMPLE // max(1, columns))]
        sample = some.detach().cpu().clone()
        self._seen[index] = Seen(list(names), tuple(shapes), rest, sample, gradients[0].dtype)

    def names(self) -> list[list[str]]:
        """Of the parameters in each bucket."""
        return [self._seen[index].names for index in sorted(self._seen)]

    def agree(self, meet: Meet, schemes: Sequence[Scheme], plain: float) -> Agreed:
        """What all ranks decide by, the largest of their figures; ``plain``: this rank's seconds of a step."""
        seen = [self._seen[index] for index in sorted(self._seen)]
        latency, alone = meet.probe()
        steps = [each for each in self._steps if len(each) == len(seen)]
        buckets = [
            Timed(
                statistics.median(each.ready for each in column),
                min(each.took for each in column),
                column[0].sent,
            )
            for column in zip(*steps, strict=True)
        ] or [Timed(0.0, 0.0, 0)] * len(seen)
        most = max(buckets, key=lambda each: each.sent, default=Timed(0.0, 0.0, 0))
        # Buckets come while backward computes, the probe comes alone: what is slower than both is neither's link.
        per_byte = alone
        if most.sent and most.took > latency:
            per_byte = min(alone, (most.took - latency) / most.sent)
        mine = [latency, alone, per_byte, plain, float(meet.crowded()), *(each.ready for each in buckets)]
        for chosen in schemes:
            error = max((one.error(chosen) for one in seen), default=0.0)
            mine += [*kernel_seconds(chosen, device=meet.device), error]
        latency, alone, per_byte, plain, busy, *rest = meet.agree(mine)
        ready, figures = rest[: len(seen)], rest[len(seen) :]
        work = {each: (figures[3 * at], figures[3 * at + 1]) for at, each in enumerate(schemes)}
        return Agreed(
            costs=Costs(ranks=meet.ranks, latency=latency, per_byte=per_byte, work=work, crowded=bool(busy)),
            loads=[
                Load(ready=at, matrices=one.matrices, rest=one.rest, dtype=one.dtype)
                for at, one in zip(ready, seen, strict=True)
            ],
            errors={each: figures[3 * at + 2] for at, each in enumerate(schemes)},
            link=alone,
            plain=plain,
        )
