"""A bucket under way, and what is done and counted when the mean is there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from dtcomm.collectives import Work
from dtcomm.compress.bucket_layout import BucketLayout
from dtcomm.compress.error_sample import ErrorSample, l2_norm
from dtcomm.compress.error_state import ErrorState, PendingGradient
from dtcomm.compress.guard_monitor import Monitor
from dtcomm.compress.report import total_seconds
from dtcomm.compress.step_recorder import BucketRecord
from dtcomm.device.streams import AsyncHostCopy
from dtcomm.profiling import Message


@dataclass
class InFlightBucket:
    """``handed`` is what the collective was given of each lossy segment; ``samples`` are there on sampled steps;
    ``told`` is what the ranks tell each other about the step before, on its way with the last bucket; ``key`` chooses
    the random numbers of what is kept; ``done`` is what DDP waits for; ``ready`` is when
    it left; ``*_ns`` are for timelines: the hook's beginning and end, and when the mean had landed."""

    work: Work
    packing: BucketLayout
    buffer: torch.Tensor
    handed: list[PendingGradient]
    samples: list[ErrorSample] | None
    told: torch.Tensor | None
    key: int
    heard: AsyncHostCopy | None = None
    done: torch.futures.Future[torch.Tensor] | None = None
    ready: float = field(default_factory=time.perf_counter)
    index: int = 0
    ready_ns: int = 0
    launched_ns: int = 0
    done_ns: int = 0
    ready_there: Any = None  # marks of a device's clock
    landed_there: Any = None

    @property
    def sent(self) -> BucketRecord:
        """For a record; the work is done."""
        return BucketRecord(
            self.buffer.numel() * self.buffer.element_size(), self.ready, self.work.seconds or 0.0
        )

    @property
    def message(self) -> Message:
        """For a timeline; the work is done."""
        return Message(
            label=f"bucket {self.index}",
            codec=self.packing.spec,
            plain_bytes=self.buffer.numel() * self.buffer.element_size(),
            wire_bytes=self.work.wire_bytes,
            ready=self.ready_ns,
            launched=self.launched_ns,
            started=self.work.started_ns,
            finished=self.work.finished_ns,
            done=self.done_ns,
            spans=self.work.spans(),
        )

    def land(self, memory: ErrorState) -> None:
        """Finish the gradients and keep what was lost of them; the work is done. Once, before DDP reads the buffer."""
        for handed in self.handed:
            memory.finish(handed, self.key)
        if self.samples is None:
            self.handed = []  # what is kept in fewer bytes gives up its fp32 here

    def settle(self, watch: Monitor) -> None:
        """Count what was sent and lost, after it has landed."""
        packing = self.packing
        packing.messages += 1
        packing.wire_bytes += self.work.wire_bytes
        packing.seconds = total_seconds((packing.seconds, self.work.seconds))
        for handed, sample in zip(self.handed, self.samples or (), strict=True):
            if handed.residual is None:
                continue
            handed.segment.add_sample(sample.gradient_norm, l2_norm(handed.residual))
            watch.record_error(sample, handed.residual)
        watch.check_finite(self.buffer)
        if self.told is not None:
            self.heard = AsyncHostCopy(self.told)
