"""``compress(model, "auto")``: what each bucket would cost with each candidate, and what the error would be.

A step is replayed bucket by bucket, as `dtcomm plan` does it, with figures of this job: when buckets were ready, what
an uncompressed one took, what a message of next to nothing takes, and what the kernels need on this core. All of it is
agreed upon (the slowest rank counts), and everything here is a function of that, so ranks decide alike.
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
from dtcomm.compress.spec import Scheme, parse_scheme, wire_codec
from dtcomm.planner.estimate import CALL, STEP, estimate
from dtcomm.planner.hardware import Device, System
from dtcomm.planner.links import Port

NAME = "auto"
NONE = codec("none")
BASELINE = "plain DDP"
CANDIDATES = ("none", "fp16", "int8", "int4")
BUDGET = 0.2  # of the default candidates; int4's error on ordinary gradients is about 0.1
MEMORY_SPEED = 2e9  # bytes a second, beyond which there is no link worth the name
GAIN = 1.05  # that is expected of what loses anything


@dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """What `compress` with "auto" may choose from.

    budget: the relative error of one encoding of a gradient, at most; None: 0.2, and no limit where `candidates` are
        given, since naming them allows them. candidates: schemes or their specs; "none" is always one of them.
    every: steps between two looks at whether the choice is still right.
    """

    budget: float | None = None
    candidates: Sequence[str | Scheme] | None = None
    every: int = 500
    schemes: tuple[Scheme, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.budget is not None and not self.budget > 0:
            raise ValueError(f"budget={self.budget}: want a relative error above 0, such as {BUDGET}")
        if self.every < 1:
            raise ValueError(f"check_every={self.every}: want 1 or more steps")
        given = CANDIDATES if self.candidates is None else self.candidates
        if isinstance(given, str) or not given:
            raise ValueError(f"candidates={given!r}: want a list of specs, such as {list(CANDIDATES)}")
        schemes = tuple(dict.fromkeys((NONE, *map(parse_scheme, given))))
        if any(isinstance(each, DGC) for each in schemes):
            raise ValueError("candidates: dgc replaces the optimiser's momentum and cannot come and go")
        object.__setattr__(self, "schemes", schemes)

    @property
    def limit(self) -> float:
        """Of the relative error."""
        if self.budget is not None:
            return self.budget
        return BUDGET if self.candidates is None else math.inf


@dataclass(frozen=True, kw_only=True)
class BucketProfile:
    """One bucket: when it was ready, seconds after the first; its matrices, which may be compressed; elements that go
    uncompressed in any case."""

    ready: float
    matrices: tuple[tuple[int, int], ...]
    rest: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Of the matrices."""
        return sum(rows * columns for rows, columns in self.matrices)


@dataclass(frozen=True, kw_only=True)
class LinkCosts:
    """This job's figures: seconds of a small message, and of a byte that a rank sends uncompressed; seconds an element
    to encode and to decode (PowerSGD: of its passes, and 0), by scheme. ``cpu_oversubscribed``: no core is
    free for it."""

    ranks: int
    latency: float
    per_byte: float
    work: Mapping[Scheme, tuple[float, float]]
    cpu_oversubscribed: bool

    def system(self) -> System:
        """For the planner: every rank behind a link of its own, unless it is as fast as memory."""
        apart = self.per_byte > 1 / MEMORY_SPEED
        engine = "gloo" if apart else "memory"
        beside = STEP[engine][apart] + CALL[engine] / 2
        port = Port(
            kind="tcp" if apart else "memory",
            gbytes=1e-9 / max(self.per_byte, 1e-12),
            latency_us=max(0.0, self.latency / 2 * 1e6 - beside),
        )
        codecs = [(each, pair) for each, pair in self.work.items() if not isinstance(each, PowerSGD)]
        rates = tuple(
            (str(wire_codec(each)), 4e-9 / max(a, 1e-12), 4e-9 / max(b, 1e-12)) for each, (a, b) in codecs
        )
        device = Device(name="here", memory_gbytes=40.0, rates=rates)
        hosts = self.ranks if apart else 1
        return System(
            name="here", device=device, inside=port, between=port, hosts=hosts, per_host=self.ranks // hosts
        )

    def bucket(self, load: BucketProfile, chosen: Scheme) -> tuple[float, float]:
        """Seconds of one bucket's way, and those of them that a core works."""
        system = self.system()

        def message(sent: Codec, elements: int) -> float:
            dtype = load.dtype if sent == NONE else torch.float32
            found = estimate("all_reduce", "two_shot", sent, system, elements * dtype.itemsize, dtype)
            return 0.0 if found is None else found.seconds

        share = 2 * (self.ranks - 1) / self.ranks
        rest = share * load.rest * load.dtype.itemsize * self.per_byte
        if not load.elements:
            return message(NONE, load.rest), 0.0
        if isinstance(chosen, PowerSGD):
            work = load.elements * self.work[chosen][0]
            factors = sum(min(chosen.rank, *sides) * sum(sides) for sides in load.matrices)
            messages = 1 if chosen.alternate else 2
            return rest + work + messages * message(chosen.factors, max(1, factors // 2)), work
        encode, decode = self.work[chosen]
        # Two shots: a rank encodes its tensor and its part of the sum, and decodes what comes of either.
        work = load.elements * (encode + decode) * (1 + 1 / self.ranks)
        return rest + message(wire_codec(chosen), load.elements), work

    def step(self, loads: Sequence[BucketProfile], chosen: Sequence[Scheme]) -> float:
        """Seconds from the first bucket to the end, with a scheme for each bucket."""
        free = delay = 0.0
        for load, each in zip(loads, chosen, strict=True):
            seconds, work = self.bucket(load, each)
            free = max(free, load.ready + delay) + seconds
            if self.cpu_oversubscribed:
                delay += work
        return max(free, loads[-1].ready + delay)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A scheme for each bucket, what a step is predicted to take, and the largest error. ``own``: uncompressed, by the
    group's own backend, as DDP does it without a hook."""

    schemes: tuple[Scheme, ...]
    seconds: float
    error: float
    own: bool = False

    @property
    def plain(self) -> bool:
        """Nothing is lost."""
        return all(each == NONE for each in self.schemes)

    def __str__(self) -> str:
        if self.own:
            return BASELINE
        counts: dict[str, int] = {}
        for each in self.schemes:
            counts[str(each)] = counts.get(str(each), 0) + 1
        if len(counts) == 1:
            return next(iter(counts))
        return " + ".join(
            f"{name} ({count} of {len(self.schemes)} buckets)" for name, count in counts.items()
        )


def plans(
    costs: LinkCosts,
    loads: Sequence[BucketProfile],
    errors: Mapping[Scheme, float],
    limit: float,
    most: int = 4,
) -> list[Plan]:
    """What is worth a trial, the best first; the last two are always plain DDP and ours uncompressed.

    One scheme for all buckets, and a mixture: bucket by bucket from the last one, which nothing hides, the scheme with
    the least error that makes the step no longer.
    """

    def plan(chosen: Sequence[Scheme]) -> Plan:
        error = max(errors[each] for each in chosen)
        return Plan(schemes=tuple(chosen), seconds=costs.step(loads, chosen), error=error)

    allowed = [each for each in costs.work if each == NONE or errors[each] <= limit]
    alike = {each: plan([each] * len(loads)) for each in allowed}
    plain = alike.pop(NONE)
    ranked = sorted(alike.values(), key=lambda each: each.seconds)
    if ranked:
        chosen = list(ranked[0].schemes)
        best = ranked[0].seconds
        for at in range(len(loads)):
            for each in sorted(allowed, key=lambda each: errors[each]):
                other = [*chosen[:at], each, *chosen[at + 1 :]]
                if costs.step(loads, other) <= 1.005 * best:
                    chosen = other
                    break
        mixture = plan(chosen)
        if mixture not in ranked:
            ranked.insert(1, mixture)
    promising = [each for each in ranked if each.seconds * GAIN < plain.seconds]
    near = [each for each in promising if each.seconds <= 1.5 * promising[0].seconds]
    return [*near[:most], replace(plain, own=True), plain]


def pick(tried: Sequence[tuple[Plan, float]]) -> Plan:
    """From plans and what a step took with each: the least error of those as good as the best.

    What loses anything must be 3 % faster than what does not, where that was tried, and DDP's own way 1 % faster than
    ours.
    """
    lossless = [(plan, seconds * (1.01 if plan.own else 1.0)) for plan, seconds in tried if plan.plain]
    usual = min((seconds for _, seconds in lossless), default=math.inf)
    lossy = [(plan, seconds) for plan, seconds in tried if not plan.plain and seconds * 1.03 < usual]
    if not lossy:
        return next(plan for plan, seconds in lossless if seconds == usual)
    best = min(seconds for _, seconds in lossy)
    good = [plan for plan, seconds in lossy if seconds <= 1.02 * best]
    return min(good, key=lambda plan: plan.error)


def cpu_oversubscribed(local_ranks: int) -> bool:
    """Whether ranks have no core besides the one that computes."""
    return len(os.sched_getaffinity(0)) < 2 * local_ranks
