"""A bucket under way, and what is counted when it is done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtcomm.collectives import Work
from dtcomm.compress.feedback import Residuals
from dtcomm.compress.guard import Sample, Watch
from dtcomm.compress.packing import Packing, Segment

LOOKED_AT = 8192  # elements of a reduced bucket that are searched for NaN and Inf


@dataclass
class Flight:
    """``residuals`` are those handed to the collective, one or None per lossy segment; ``deferred`` marks
    those that are added to the stored ones afterwards; ``samples`` are there on sampled steps; ``told`` is
    what the ranks tell each other about the step before, on its way with the last bucket."""

    work: Work
    packing: Packing
    buffer: torch.Tensor
    residuals: list[torch.Tensor | None]
    deferred: list[bool]
    samples: list[Sample] | None
    told: torch.Tensor | None

    def settle(self, stored: Residuals, watch: Watch | None) -> None:
        """Count what was sent and lost; the work is done."""
        packing = self.packing
        packing.messages += 1
        packing.wire_bytes += self.work.wire_bytes
        packing.seconds += self.work.seconds
        lossy: Sequence[Segment] = packing.lossy
        for position, (segment, residual) in enumerate(zip(lossy, self.residuals, strict=True)):
            if residual is None:
                continue
            if self.samples is not None:
                sample = self.samples[position]
                _count(segment, sample.gradient, float(torch.linalg.vector_norm(residual)))
                if watch is not None:
                    watch.measured(sample, residual)
            if self.deferred[position]:
                stored.get(segment.name, residual).add_(residual)
        if watch is not None and not torch.isfinite(self.buffer[:: self._stride()]).all():
            watch.bad()

    def _stride(self) -> int:
        return max(1, self.buffer.numel() // LOOKED_AT)


def is_zero(gradient: torch.Tensor) -> bool:
    """Whether every element is 0, at next to no cost where the first or the last is not."""
    return gradient.numel() == 0 or not (bool(gradient[0]) or bool(gradient[-1]) or bool(gradient.any()))


def _count(segment: Segment, signal: float, error: float) -> None:
    if math.isfinite(signal) and math.isfinite(error):
        segment.signal += signal * signal
        segment.error += error * error
