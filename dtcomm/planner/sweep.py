"""The answers of ``dtcomm plan``: which algorithm and codec, what they gain, and from which size on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtcomm import algorithms as registry
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import Codec
from dtcomm.planner import nccl_model
from dtcomm.planner.cost_model import Table
from dtcomm.planner.estimate import UNMEASURED, Estimate, candidates, estimate
from dtcomm.planner.hardware import System

SMALLEST, LARGEST = 1 << 10, 1 << 36  # where a break-even is looked for
WORTH = 1.1  # a gain below this is within the error of an estimate


@dataclass(frozen=True, kw_only=True)
class Row:
    """The best algorithm of a codec at a size, and how much faster it is than the best without a codec."""

    best: Estimate
    speedup: float
    others: tuple[Estimate, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**self.best.as_dict(), "speedup": round(self.speedup, 4)}


@dataclass(kw_only=True)
class Plan:
    """Rows by size, then codec, ``none`` first; ``break_even`` maps codecs to the bytes from which they pay, None
    where they never do, and ``words`` say so. ``placement``: of this machine's CPUs, where its own times are asked for.
    """

    system: System
    collective: str
    table: Table = UNMEASURED
    dtype: torch.dtype = torch.float32
    placement: str = ""
    rows: list[Row] = field(default_factory=list)
    break_even: dict[str, int | None] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def estimates(self, names: Sequence[str], codec: Codec, nbytes: int) -> list[Estimate]:
        """Of those algorithms that can be estimated; the others are noted in ``skipped``."""
        found = []
        for name in names:
            made = estimate(
                self.collective, name, codec, self.system, nbytes, self.dtype, self.table, self.placement
            )
            if made is not None:
                found.append(made)
            elif name not in self.skipped:
                self.skipped.append(name)
        return found

    def baseline(self, nbytes: int) -> float:
        """Seconds of the fastest algorithm without a codec."""
        none = parse("none")
        names = candidates(self.collective, none, self.system)
        return min((made.seconds for made in self.estimates(names, none, nbytes)), default=0.0)

    def pays_from(self, codec: Codec, names: Sequence[str] | None = None) -> int | None:
        """The least size in bytes, to a sixteenth, from which on ``codec`` is faster than none; None where it never
        is.
        """
        names = candidates(self.collective, codec, self.system) if names is None else names

        def pays(nbytes: int) -> bool:
            ours = [made.seconds for made in self.estimates(names, codec, nbytes)]
            return bool(ours) and self.baseline(nbytes) > WORTH * min(ours)

        if not pays(LARGEST):
            return None
        low = LARGEST
        while low > SMALLEST and pays(low // 2):
            low //= 2
        if low <= SMALLEST:
            return low
        high, low = low, low // 2
        for _ in range(4):
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high


def make(
    system: System,
    collective: str,
    sizes: Sequence[int],
    codecs: Sequence[str],
    algorithms: Sequence[str] = ("auto",),
    dtype: torch.dtype = torch.float32,
    table: Table = UNMEASURED,
    placement: str = "",
) -> Plan:
    """Estimate every size with ``none`` and each of ``codecs``; ``algorithms`` may hold auto, all or names.

    With auto there is one row for a size and codec, its fastest, else one for each algorithm.
    """
    parsed = [parse("none"), *dict.fromkeys(each for each in map(parse, codecs) if each.name != "none")]
    plan = Plan(system=system, collective=collective, table=table, dtype=dtype, placement=placement)
    names = {each: _names(plan, each, algorithms) for each in parsed}
    for nbytes in sizes:
        base = plan.baseline(nbytes)
        for each in parsed:
            ordered = sorted(plan.estimates(names[each], each, nbytes), key=lambda made: made.seconds)
            shown = ordered[:1] if "auto" in algorithms else ordered
            for at, made in enumerate(shown):
                gain = base / made.seconds if made.seconds else 1.0
                plan.rows.append(Row(best=made, speedup=gain, others=() if at else tuple(ordered[1:])))
    for each in parsed[1:]:
        plan.break_even[str(each)] = plan.pays_from(each, names[each])
        plan.words.append(_verdict(plan, str(each)))
    return plan


def _names(plan: Plan, codec: Codec, asked: Sequence[str]) -> tuple[str, ...]:
    collective, system = plan.collective, plan.system
    if set(asked) <= {"auto", "all"}:
        return candidates(collective, codec, system)
    own = nccl_model.algorithms(collective, system) if system.engine == "nccl" else ()
    for name in asked:
        if name not in own:
            registry.require(name, collective, besides=("auto", "all", *own))
    # What only NCCL has moves no codec's payloads.
    ours = registry.available(collective)
    return tuple(
        name for name in asked if name.partition(":")[0] in ours or (codec.name == "none" and name in own)
    )


def _verdict(plan: Plan, spec: str) -> str:
    at = plan.break_even[spec]
    gains = [row.speedup for row in plan.rows if row.best.codec == spec]
    where = "on the local engine" if plan.system.engine == "memory" else "on this system"
    if not gains:
        return f"{spec}: no algorithm that was asked for can carry it, or be estimated for {plan.system.ranks} ranks"
    if at is None:
        return (
            f"{where} {spec} is not faster than none: it saves bytes where bytes are not what takes the time "
            f"(gains below {WORTH - 1:.0%} are not counted)"
        )
    if max(gains) <= WORTH:
        return f"{where} {spec} does not pay at the sizes shown; it would from {size_name(at)} on"
    return f"{where} {spec} pays from {size_name(at)} on, up to {max(gains):.2f}x at the sizes shown"


def size_name(nbytes: int) -> str:
    """``1.5 MiB``, four digits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}" if nbytes % scale else f"{nbytes // scale} {unit}"
    return f"{nbytes} B"
