"""Searches the layouts of a job: the fastest, and what does not fit and why.

Every layout is predicted without codecs. For the fastest of them, and for those that would be fastest if communication
cost nothing, each axis then takes the codec that saves most. Codecs that together save less than the planner's error
(`MIN_SPEEDUP`) are not recommended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtcomm.extensions.jobs.layout import AXES, RECOMPUTE, SCHEDULES, STAGES, Job, Layout
from dtcomm.extensions.jobs.network import Network
from dtcomm.extensions.jobs.rank_costs import USABLE, JobMemory, job_memory
from dtcomm.extensions.jobs.step import JobStep, job_step
from dtcomm.extensions.jobs.sweep import MIN_SPEEDUP

MICRO_BATCHES = (1, 2, 4, 8, 16)
LEAST_CONTEXT = 2048  # tokens of a sequence that context parallelism leaves on a rank
WITH_CODECS = 48  # layouts of each kind that are predicted with codecs
MOST_CHUNKS = 8
#: What a reader chooses between; 3-D is all that has pipeline stages, context parallelism, or TP without FSDP.
FAMILIES = ("DDP", "ZeRO", "FSDP", "FSDP + TP", "3-D")
#: Fields of a layout that may be fixed, with what a search tries if they are not.
FIXABLE = ("dp", "tp", "pp", "cp", "ep", "stage", "schedule", "micro_batch", "recompute")


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """Layouts of a family that do not fit in memory, by the one that needs least.

    Args:
        family: One of `FAMILIES`.
        layout: The layout that needs least.
        memory: What it needs.
    """

    family: str
    layout: Layout
    memory: JobMemory

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        part, size = self.memory.largest
        needs = {"total": round(self.memory.total), "largest": part, "largest_bytes": round(size)}
        return {"family": self.family, "layout": self.layout.as_dict(), **needs}


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What a search found.

    Attributes:
        job: The job.
        steps: The best layout of each family without codecs, fastest first; empty if none fits.
        compressed: The same with codecs; empty if no codec saves anything.
        misfits: For each family of which no layout fits in memory, the one that needs least.
        tried: How many layouts were possible, and how many of them fit.
    """

    job: Job
    steps: tuple[JobStep, ...]
    compressed: tuple[JobStep, ...]
    misfits: tuple[Misfit, ...]
    tried: tuple[int, int]

    @property
    def rows(self) -> tuple[JobStep, ...]:
        """The best layout of each family, the winner first; with codecs only if they gain more than the error."""
        compressed = {family(step.layout): step for step in self.compressed}
        winner, rows = self.winner, []
        for step in self.steps:
            other = compressed.get(family(step.layout), step)
            rows.append(other if step.seconds >= MIN_SPEEDUP * other.seconds else step)
        if winner is not None:
            rows = [winner, *(step for step in rows if family(step.layout) != family(winner.layout))]
        return tuple(rows)

    @property
    def speedup(self) -> float:
        """What codecs gain: the best step without by the best step with them, 1 if they gain nothing."""
        if not self.steps:
            return math.inf if self.compressed else 1.0
        return max(1.0, self.steps[0].seconds / self.compressed[0].seconds) if self.compressed else 1.0

    @property
    def winner(self) -> JobStep | None:
        """The recommended step: with codecs only if they gain more than the error of the prediction."""
        if self.compressed and self.speedup >= MIN_SPEEDUP:
            return self.compressed[0]
        return self.steps[0] if self.steps else None


def search(job: Job, codecs: Sequence[str] = ("int8",), fixed: Mapping[str, Any] | None = None) -> JobPlan:
    """Search the layouts of a job.

    Args:
        job: The job.
        codecs: Codecs to try on every axis.
        fixed: Values of some of `FIXABLE`.

    Returns:
        The plan. Its ``steps`` are empty if no layout fits in memory.

    Raises:
        ValueError: No layout is possible, whatever memory there is. The message says why.

    Example:
        >>> from dtcomm.extensions.jobs.hardware import find_system
        >>> from dtcomm.extensions.jobs import Job, find_model, search
        >>> job = Job(model=find_model("llama3-8b"), system=find_system("h100"), batch=64, seq=8192)
        >>> search(job).winner.fits()
        True
    """
    fixed = {} if fixed is None else dict(fixed)
    if unknown := sorted(set(fixed) - set(FIXABLE)):
        raise ValueError(f"fixed: {unknown[0]!r} is not one of {', '.join(FIXABLE)}")
    network = Network(job.system, job.dtype)
    capacity = USABLE * job.system.device.memory_bytes
    steps: list[JobStep] = []
    least: dict[str, Misfit] = {}
    possible = 0
    for layout in layouts(job, fixed):
        possible += 1
        memory = job_memory(job, layout)
        if capacity and memory.total > capacity:
            kind = family(layout)
            if kind not in least or memory.total < least[kind].memory.total:
                least[kind] = Misfit(family=kind, layout=layout, memory=memory)
            continue
        steps.append(job_step(job, layout, network))
    if not possible:
        raise ValueError(_why_none(job, fixed))
    steps.sort(key=_order)
    compressed = _with_codecs(job, steps, codecs, network)
    found = {family(step.layout) for step in steps}
    return JobPlan(
        job=job, steps=tuple(_best_of_families(steps)), compressed=tuple(_best_of_families(compressed)),
        misfits=tuple(least[kind] for kind in FAMILIES if kind in least and kind not in found),
        tried=(possible, len(steps)),
    )  # fmt: skip


def layouts(job: Job, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Yield the layouts that are possible for a job's shape, whether they fit in memory or not."""
    model, ranks = job.model, job.system.ranks

    def tried(name: str, values: Sequence[Any]) -> Sequence[Any]:
        return (fixed[name],) if name in fixed else values

    most_tp = min(ranks, 2 * job.system.per_host)
    for tp in tried("tp", [n for n in _divisors(ranks) if n <= most_tp]):
        for pp in tried("pp", [n for n in _divisors(ranks // tp) if n <= model.layers]):
            contexts = [n for n in (1, 2, 4, 8, 16, 32) if n == 1 or job.seq // n >= LEAST_CONTEXT]
            for cp in tried("cp", contexts):
                dp, rest = divmod(ranks, tp * pp * cp)
                if rest or not dp or fixed.get("dp", dp) != dp:
                    continue
                experts = [n for n in _divisors(dp * cp) if model.experts and model.experts % n == 0]
                for ep in tried("ep", experts or [1]):
                    base = Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
                    yield from _variants(job, base, tried, fixed)


def _variants(job: Job, base: Layout, tried: Any, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Yield the stages, schedules, micro-batches and recomputations of a mesh."""
    recompute = [kind for kind in RECOMPUTE if kind != "selective" or not job.flash]
    stages = STAGES if base.replicas > 1 else ("ddp",)
    for micro_batch in tried("micro_batch", MICRO_BATCHES):
        if job.batch % (base.dp * micro_batch):
            continue
        for schedule, chunks in _schedules(job, base, fixed):
            for stage in tried("stage", stages):
                for kind in tried("recompute", recompute):
                    order = {"micro_batch": micro_batch, "schedule": schedule, "chunks": chunks}
                    layout = replace(base, **order, stage=stage, recompute=kind)
                    if layout.problem(job) is None:
                        yield layout


def _schedules(job: Job, base: Layout, fixed: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    if base.pp == 1:
        yield fixed.get("schedule", "1f1b"), 1
        return
    for schedule in (fixed["schedule"],) if "schedule" in fixed else SCHEDULES:
        if schedule != "interleaved":
            yield schedule, 1
            continue
        per_stage = job.model.layers // base.pp
        most = min(MOST_CHUNKS, per_stage)
        chunks = [n for n in range(2, most + 1) if job.model.layers % (base.pp * n) == 0]
        for count in sorted({chunks[0], chunks[-1]} if chunks else {2} if per_stage >= 2 else set()):
            yield schedule, count


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _why_none(job: Job, fixed: Mapping[str, Any]) -> str:
    given = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "none"
    wanted = {name: value for name, value in fixed.items() if name != "dp"}
    ranks = job.system.ranks
    layout = Layout(**{"dp": 1, **wanted})
    dp = ranks // max(1, layout.tp * layout.pp * layout.cp)
    layout = replace(layout, dp=fixed.get("dp", max(1, dp)))
    reason = layout.problem(job) or f"no division of {ranks} ranks and a batch of {job.batch} is possible"
    return f"no layout is possible (fixed: {given}): {reason}"


def _with_codecs(
    job: Job, steps: Sequence[JobStep], codecs: Sequence[str], network: Network
) -> list[JobStep]:
    """Return the best of the layouts, each axis with the codec that saves most, if any does."""
    quiet = sorted(steps, key=lambda step: step.seconds - step.exposed_total)
    fastest = (*steps[:WITH_CODECS], *quiet[:WITH_CODECS], *_best_of_families(steps))
    chosen = {id(step): step for step in fastest}
    found = []
    for step in chosen.values():
        best = step
        for axis in AXES:
            if step.exposed[axis] < 0.01 * step.seconds:
                continue
            for spec in codecs:
                candidate = job_step(job, best.layout.with_codec(axis, spec), network)
                if candidate.fits() and candidate.seconds < best.seconds:
                    best = candidate
        if best is not step:
            found.append(best)
    found.sort(key=_order)
    return found


def _order(step: JobStep) -> tuple[float, int, float]:
    """Sort by time; of layouts that are equally fast, the one that divides less, and then that with less memory."""
    layout = step.layout
    return float(f"{step.seconds:.3g}"), layout.tp * layout.pp * layout.cp * layout.ep, step.memory.total


def family(layout: Layout) -> str:
    """Return the one of `FAMILIES` that a layout belongs to."""
    if layout.pp * layout.cp > 1 or (layout.tp > 1 and layout.stage != "fsdp"):
        return "3-D"
    kind = {"ddp": "DDP", "fsdp": "FSDP"}.get(layout.stage, "ZeRO")
    return f"{kind} + TP" if layout.tp > 1 else kind


def _best_of_families(steps: Sequence[JobStep]) -> list[JobStep]:
    """Return the first step of each family."""
    best: dict[str, JobStep] = {}
    for step in steps:
        best.setdefault(family(step.layout), step)
    return list(best.values())
