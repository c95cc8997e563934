"""What the autotuner measures in its first steps: buckets, samples of their gradients, the link and the kernels."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dtcomm.compress.autotune_model import BucketProfile, LinkCosts
from dtcomm.compress.kernel_costs import SAMPLE_ELEMENTS, kernel_seconds, relative_error
from dtcomm.compress.policy import MIN_COMPRESSED_ELEMENTS
from dtcomm.compress.spec import Scheme, matrix_shape
from dtcomm.ddp.autotune.consensus import Consensus


@dataclass(frozen=True)
class BucketTiming:
    """One bucket of a step.

    Attributes:
        ready: Seconds from the first bucket of the step until this one was ready.
        seconds: How long its collective took.
        wire_bytes: What this rank sent.
    """

    ready: float
    seconds: float
    wire_bytes: int


@dataclass(frozen=True)
class BucketInfo:
    """What one bucket contains.

    Attributes:
        names: Its parameters.
        matrices: The shapes of the parameters that may be compressed.
        uncompressed_elements: The elements of the others.
        sample: Rows of the largest matrix, on the CPU.
        dtype: The dtype of the gradients.
    """

    names: list[str]
    matrices: tuple[tuple[int, int], ...]
    uncompressed_elements: int
    sample: torch.Tensor
    dtype: torch.dtype

    def error(self, scheme: Scheme) -> float:
        """Return the relative error of one encoding of the sample."""
        return relative_error(scheme, self.sample) if self.sample.numel() else 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """What all ranks agreed on.

    Attributes:
        costs: The costs of the link and of the kernels.
        buckets: The profile of each bucket.
        errors: The relative error of each scheme.
        probe_per_byte: Seconds for each byte of the probe alone.
        uncompressed_seconds: Seconds of an uncompressed step.
    """

    costs: LinkCosts
    buckets: list[BucketProfile]
    errors: Mapping[Scheme, float]
    probe_per_byte: float
    uncompressed_seconds: float


class Measurements:
    """What one rank measured."""

    def __init__(self) -> None:
        self._steps: list[Sequence[BucketTiming]] = []
        self._buckets: dict[int, BucketInfo] = {}

    def add_step(self, timings: Sequence[BucketTiming]) -> None:
        """Add the timings of the buckets of one step."""
        self._steps.append(timings)

    def sample_bucket(self, index: int, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """Record what a bucket contains, before it is reduced."""
        shapes, uncompressed = [], 0
        largest = torch.empty(0, 0)
        for gradient in gradients:
            if gradient.ndim < 2 or gradient.numel() < MIN_COMPRESSED_ELEMENTS:
                uncompressed += gradient.numel()
                continue
            shapes.append(matrix_shape(gradient))
            if gradient.numel() > largest.numel():
                largest = gradient
        rows, columns = matrix_shape(largest)
        some_rows = largest.reshape(rows, columns)[: max(1, SAMPLE_ELEMENTS // max(1, columns))]
        sample = some_rows.detach().cpu().clone()
        self._buckets[index] = BucketInfo(
            list(names), tuple(shapes), uncompressed, sample, gradients[0].dtype
        )

    def names(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket."""
        return [self._buckets[index].names for index in sorted(self._buckets)]

    def agree(
        self, consensus: Consensus, schemes: Sequence[Scheme], uncompressed_seconds: float
    ) -> MeasuredCosts:
        """Return what all ranks decide by: the largest of their measurements.

        Args:
            consensus: The ranks.
            schemes: The schemes to measure.
            uncompressed_seconds: This rank's time of an uncompressed step.
        """
        infos = [self._buckets[index] for index in sorted(self._buckets)]
        latency, probe_per_byte = consensus.probe()
        steps = [timings for timings in self._steps if len(timings) == len(infos)]
        timings = [
            BucketTiming(
                statistics.median(timing.ready for timing in bucket),
                min(timing.seconds for timing in bucket),
                bucket[0].wire_bytes,
            )
            for bucket in zip(*steps, strict=True)
        ] or [BucketTiming(0.0, 0.0, 0)] * len(infos)
        largest = max(timings, key=lambda timing: timing.wire_bytes, default=BucketTiming(0.0, 0.0, 0))
        # Buckets are sent while backward computes, the probe alone: the faster of the two is the link's speed.
        per_byte = probe_per_byte
        if largest.wire_bytes and largest.seconds > latency:
            per_byte = min(probe_per_byte, (largest.seconds - latency) / largest.wire_bytes)
        oversubscribed = float(consensus.cpu_oversubscribed())
        own = [latency, probe_per_byte, per_byte, uncompressed_seconds, oversubscribed]
        own += [timing.ready for timing in timings]
        for scheme in schemes:
            error = max((bucket.error(scheme) for bucket in infos), default=0.0)
            own += [*kernel_seconds(scheme, device=consensus.device), error]
        latency, probe_per_byte, per_byte, uncompressed_seconds, oversubscribed, *rest = consensus.max(own)
        ready, by_scheme = rest[: len(infos)], rest[len(infos) :]
        kernels = {scheme: (by_scheme[3 * i], by_scheme[3 * i + 1]) for i, scheme in enumerate(schemes)}
        return MeasuredCosts(
            costs=LinkCosts(
                ranks=consensus.ranks,
                latency=latency,
                per_byte=per_byte,
                kernel_seconds=kernels,
                cpu_oversubscribed=bool(oversubscribed),
            ),
            buckets=[
                BucketProfile(
                    ready=seconds,
                    matrices=info.matrices,
                    uncompressed_elements=info.uncompressed_elements,
                    dtype=info.dtype,
                )
                for seconds, info in zip(ready, infos, strict=True)
            ],
            errors={scheme: by_scheme[3 * i + 2] for i, scheme in enumerate(schemes)},
            probe_per_byte=probe_per_byte,
            uncompressed_seconds=uncompressed_seconds,
        )
