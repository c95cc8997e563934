"""Averages of `LocalSGD` that were started and not applied yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dtcomm.collectives import Work
from dtcomm.compress.bucket import BucketLayout
from dtcomm.compress.error_state import PendingGradient
from dtcomm.compress.measurements import ErrorSample, GradientMeasurement
from dtcomm.compress.stage_scheduler import Stages
from dtcomm.local_sgd.fragments import Fragment


@dataclass
class PendingBucket:
    """A bucket while it is averaged.

    Attributes:
        names: The parameters and buffers in it.
        layout: Its segments.
        stages: The stages of its average that have not begun.
        buffer: The differences, which become their mean.
        pending: Its lossy segments.
        samples: Samples of them, in averages in which errors are measured.
        measurement: What the guard measured of this rank's differences.
        work: The stage in flight; None once the average is complete.
    """

    names: list[str]
    layout: BucketLayout
    stages: Stages
    buffer: torch.Tensor
    pending: list[PendingGradient]
    samples: list[ErrorSample]
    measurement: GradientMeasurement | None
    work: Work | None = None


@dataclass
class PendingAverage:
    """An average of some fragments that was started and not applied yet.

    Attributes:
        fragments: The fragments.
        number: The number of averages before it.
        due: The step after which it is applied.
        buckets: Its messages; none if it was loaded from a checkpoint.
        stats: The guard's statistics that travel with it, or None.
        means: The mean of each tensor, flat and in fp32, by name; empty until all messages have arrived.
    """

    fragments: list[Fragment]
    number: int
    due: int
    buckets: list[PendingBucket] = field(default_factory=list)
    stats: torch.Tensor | None = None
    means: dict[str, torch.Tensor] = field(default_factory=dict)
