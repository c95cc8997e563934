"""The model behind ``compress(model, "auto")``: what a step costs with each scheme, and what the error would be.

A step is replayed bucket by bucket, as `dtcomm plan` does it, with measurements of this job: when buckets were ready,
what an uncompressed one took, what a tiny message takes, and what the kernels need on this core. All ranks agree on the
measurements (the slowest rank counts), and everything here is a function of them, so that ranks decide alike.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dtcomm.codecs import Codec, codec
from dtcomm.compress.dgc import DGC
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import LevelCodecs, Scheme, parse_scheme, wire_codec
from dtcomm.planner.estimate import CALL_US, STEP_US, estimate
from dtcomm.planner.hardware import Device, Port, System

NAME = "auto"
NONE = codec("none")
BASELINE = "plain DDP"
CANDIDATES = ("none", "fp16", "int8", "int4")
ERROR_BUDGET = 0.2  # of the default candidates; int4's error on ordinary gradients is about 0.1
MEMORY_BYTES_PER_SECOND = 2e9  # a faster transport counts as memory instead of a link
MIN_GAIN = 1.05  # the predicted speedup of a lossy candidate


@dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """What "auto" may choose from.

    Attributes:
        budget: The largest relative error of one encoding of a gradient. Default None: 0.2, and no limit if
            ``candidates`` are given, because naming them allows them.
        candidates: Schemes or their specs; "none" is always one of them. Default None: none, fp16, int8, int4.
        every: The number of steps between two checks of the choice. Default 500.
        schemes: The candidates, parsed.

    Raises:
        ValueError: An argument is out of range, or a candidate is DGC or names a codec for each level of hosts.
    """

    budget: float | None = None
    candidates: Sequence[str | Scheme] | None = None
    every: int = 500
    schemes: tuple[Scheme, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.budget is not None and (
            isinstance(self.budget, bool) or not isinstance(self.budget, int | float)
        ):
            raise TypeError(f"budget: expected a relative error such as {ERROR_BUDGET}, got {self.budget!r}")
        if self.budget is not None and not self.budget > 0:
            raise ValueError(
                f"budget={self.budget}: expected a relative error above 0, such as {ERROR_BUDGET}"
            )
        if self.every < 1:
            raise ValueError(f"check_every={self.every}: expected 1 or more steps")
        candidates = CANDIDATES if self.candidates is None else self.candidates
        if isinstance(candidates, str) or not candidates:
            raise ValueError(
                f"candidates={candidates!r}: expected a list of specs, such as {list(CANDIDATES)}"
            )
        schemes = tuple(dict.fromkeys((NONE, *map(parse_scheme, candidates))))
        if any(isinstance(scheme, DGC) for scheme in schemes):
            raise ValueError("candidates: dgc replaces the optimizer's momentum and cannot come and go")
        for scheme in schemes:
            if isinstance(scheme, LevelCodecs):
                raise ValueError(
                    f"candidates: {scheme}: the predictions behind {NAME!r} know one link, not one inside hosts and "
                    "another between them; valid: one codec each"
                )
        object.__setattr__(self, "schemes", schemes)

    @property
    def error_limit(self) -> float:
        """The largest relative error of a candidate."""
        if self.budget is not None:
            return self.budget
        return ERROR_BUDGET if self.candidates is None else math.inf


@dataclass(frozen=True, kw_only=True)
class BucketProfile:
    """One bucket.

    Attributes:
        ready: Seconds from the first bucket of the step until this one is ready.
        matrices: The shapes of the parameters that may be compressed.
        uncompressed_elements: The elements of the others.
        dtype: The dtype of the gradients.
    """

    ready: float
    matrices: tuple[tuple[int, int], ...]
    uncompressed_elements: int
    dtype: torch.dtype

    @property
    def matrix_elements(self) -> int:
        """The elements of the matrices."""
        return sum(rows * columns for rows, columns in self.matrices)


@dataclass(frozen=True, kw_only=True)
class LinkCosts:
    """The costs of communication and of kernels in this job.

    Attributes:
        ranks: The number of ranks.
        latency: Seconds of a small message.
        per_byte: Seconds for each byte that a rank sends uncompressed.
        kernel_seconds: Seconds for each element to encode and to decode, by scheme; for PowerSGD those of its passes,
            and 0.
        cpu_oversubscribed: Whether the kernels take the core that computes.
    """

    ranks: int
    latency: float
    per_byte: float
    kernel_seconds: Mapping[Scheme, tuple[float, float]]
    cpu_oversubscribed: bool

    def system(self) -> System:
        """Return the job for the planner: every rank behind its own link, unless that is as fast as memory."""
        has_link = self.per_byte > 1 / MEMORY_BYTES_PER_SECOND
        engine = "gloo" if has_link else "memory"
        overhead_us = STEP_US[engine][has_link] + CALL_US[engine] / 2
        port = Port(
            kind="tcp" if has_link else "memory",
            gbytes=1e-9 / max(self.per_byte, 1e-12),
            latency_us=max(0.0, self.latency / 2 * 1e6 - overhead_us),
        )
        rates = tuple(
            (str(wire_codec(scheme)), 4e-9 / max(encode, 1e-12), 4e-9 / max(decode, 1e-12))
            for scheme, (encode, decode) in self.kernel_seconds.items()
            if not isinstance(scheme, PowerSGD | LevelCodecs)
        )
        device = Device(name="here", memory_gbytes=40.0, rates=rates)
        hosts = self.ranks if has_link else 1
        return System(
            name="here", device=device, inside=port, between=port, hosts=hosts, per_host=self.ranks // hosts
        )

    def bucket_seconds(self, bucket: BucketProfile, scheme: Scheme) -> tuple[float, float]:
        """Return the seconds of one bucket, and those of them in which a core works."""
        system = self.system()

        def message_seconds(sent: Codec, elements: int) -> float:
            dtype = bucket.dtype if sent == NONE else torch.float32
            prediction = estimate("all_reduce", "two_shot", sent, system, elements * dtype.itemsize, dtype)
            return 0.0 if prediction is None else prediction.seconds

        bytes_per_rank = 2 * (self.ranks - 1) / self.ranks * bucket.dtype.itemsize
        uncompressed = bytes_per_rank * bucket.uncompressed_elements * self.per_byte
        elements = bucket.matrix_elements
        if not elements:
            return message_seconds(NONE, bucket.uncompressed_elements), 0.0
        if isinstance(scheme, PowerSGD):
            work = elements * self.kernel_seconds[scheme][0]
            factors = sum(min(scheme.rank, *shape) * sum(shape) for shape in bucket.matrices)
            messages = 1 if scheme.alternate else 2
            seconds = messages * message_seconds(scheme.factors, max(1, factors // 2))
            return uncompressed + work + seconds, work
        assert not isinstance(scheme, LevelCodecs)  # `AutoConfig` refuses it
        encode, decode = self.kernel_seconds[scheme]
        # In a two-shot all-reduce a rank encodes and decodes the tensor, and its share of the sum.
        work = elements * (encode + decode) * (1 + 1 / self.ranks)
        return uncompressed + message_seconds(wire_codec(scheme), elements), work

    def step_seconds(self, buckets: Sequence[BucketProfile], schemes: Sequence[Scheme]) -> float:
        """Return the seconds from the first bucket to the end of the step, with a scheme for each bucket."""
        link_free = delay = 0.0
        for bucket, scheme in zip(buckets, schemes, strict=True):
            seconds, work = self.bucket_seconds(bucket, scheme)
            link_free = max(link_free, bucket.ready + delay) + seconds
            if self.cpu_oversubscribed:
                delay += work
        return max(link_free, buckets[-1].ready + delay)


@dataclass(frozen=True, kw_only=True)
class CodecAssignment:
    """A scheme for each bucket.

    Attributes:
        schemes: The schemes.
        seconds: The predicted seconds of a step.
        error: The largest relative error.
        bypass: Uncompressed, by the group's own backend, as DDP does it without a hook.
    """

    schemes: tuple[Scheme, ...]
    seconds: float
    error: float
    bypass: bool = False

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost."""
        return all(scheme == NONE for scheme in self.schemes)

    def __str__(self) -> str:
        if self.bypass:
            return BASELINE
        counts: dict[str, int] = {}
        for scheme in self.schemes:
            counts[str(scheme)] = counts.get(str(scheme), 0) + 1
        if len(counts) == 1:
            return next(iter(counts))
        return " + ".join(
            f"{name} ({count} of {len(self.schemes)} buckets)" for name, count in counts.items()
        )


def propose_candidates(
    costs: LinkCosts,
    buckets: Sequence[BucketProfile],
    errors: Mapping[Scheme, float],
    error_limit: float,
    max_lossy: int = 4,
) -> list[CodecAssignment]:
    """Return the assignments that are worth a trial, the best first.

    They are one scheme for all buckets, and a mixture: from the fastest of these, bucket by bucket, the scheme with the
    least error that does not make the step longer. The last two are always plain DDP and our uncompressed all-reduce.
    """

    def assign(schemes: Sequence[Scheme]) -> CodecAssignment:
        error = max(errors[scheme] for scheme in schemes)
        return CodecAssignment(
            schemes=tuple(schemes), seconds=costs.step_seconds(buckets, schemes), error=error
        )

    allowed = [scheme for scheme in costs.kernel_seconds if scheme == NONE or errors[scheme] <= error_limit]
    uniform = {scheme: assign([scheme] * len(buckets)) for scheme in allowed}
    uncompressed = uniform.pop(NONE)
    ranked = sorted(uniform.values(), key=lambda candidate: candidate.seconds)
    if ranked:
        schemes = list(ranked[0].schemes)
        best = ranked[0].seconds
        for index in range(len(buckets)):
            for scheme in sorted(allowed, key=lambda scheme: errors[scheme]):
                trial = [*schemes[:index], scheme, *schemes[index + 1 :]]
                if costs.step_seconds(buckets, trial) <= 1.005 * best:
                    schemes = trial
                    break
        mixture = assign(schemes)
        if mixture not in ranked:
            ranked.insert(1, mixture)
    promising = [candidate for candidate in ranked if candidate.seconds * MIN_GAIN < uncompressed.seconds]
    near = [candidate for candidate in promising if candidate.seconds <= 1.5 * promising[0].seconds]
    return [*near[:max_lossy], replace(uncompressed, bypass=True), uncompressed]


def cpu_oversubscribed(local_ranks: int) -> bool:
    """Return whether the ranks of this host have no core besides the ones that compute."""
    return len(os.sched_getaffinity(0)) < 2 * local_ranks
