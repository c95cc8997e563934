"""Sweeps for ``dtcomm plan collective``: the fastest of each size and codec, its gain, and break-even sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtcomm import algorithms as registry
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import Codec
from dtcomm.extensions.jobs import nccl_model
from dtcomm.extensions.jobs.estimate import LINK_REACH, UNMEASURED, Estimate, candidates, estimate
from dtcomm.extensions.jobs.hardware import System
from dtcomm.planner.cost_model import Table
from dtcomm.streams import HOST_CALL_US, HOST_KERNEL_US

SMALLEST, LARGEST = 1 << 10, 1 << 36  # bytes between which a break-even is searched
MIN_SPEEDUP = 1.1  # a smaller gain is within the error of an estimate


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """The best algorithm of a codec at a size, and its speedup over the best algorithm without a codec."""

    best: Estimate
    speedup: float
    others: tuple[Estimate, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the row, for JSON."""
        return {**self.best.as_dict(), "speedup": round(self.speedup, 4)}


@dataclass(kw_only=True)
class Sweep:
    """The estimates of one collective on one system.

    ``rows`` are ordered by size, then codec, ``none`` first. ``break_even`` maps codecs to the bytes from which they
    pay, or None if they never do, and ``verdicts`` state that in words. ``skipped`` are algorithms that cannot be
    estimated.
    """

    system: System
    collective: str
    table: Table = UNMEASURED
    dtype: torch.dtype = torch.float32
    rows: list[SweepRow] = field(default_factory=list)
    break_even: dict[str, int | None] = field(default_factory=dict)
    verdicts: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def estimates(self, names: Sequence[str], codec: Codec, nbytes: int) -> list[Estimate]:
        """Return the estimates of the algorithms that can be estimated; note the others in ``skipped``."""
        estimates = []
        for name in names:
            predicted = estimate(self.collective, name, codec, self.system, nbytes, self.dtype, self.table)
            if predicted is not None:
                estimates.append(predicted)
            elif name not in self.skipped:
                self.skipped.append(name)
        return estimates

    def add_rows(
        self, sizes: Sequence[int], names: Mapping[Codec, Sequence[str]], every: bool = False
    ) -> None:
        """Add the rows of some sizes: the fastest of the algorithms in ``names`` for each codec, or all of them."""
        for nbytes in sizes:
            baseline = self.baseline(nbytes)
            for codec, algorithms in names.items():
                estimates = self.estimates(algorithms, codec, nbytes)
                ordered = sorted(estimates, key=lambda candidate: candidate.seconds)
                for index, candidate in enumerate(ordered if every else ordered[:1]):
                    speedup = baseline / candidate.seconds if candidate.seconds else 1.0
                    others = () if index else tuple(ordered[1:])
                    self.rows.append(SweepRow(best=candidate, speedup=speedup, others=others))

    @property
    def assumptions(self) -> list[str]:
        """What the estimates take for granted without a measurement, in sentences."""
        system = self.system
        if system.engine == "nccl":
            lines = [
                "NCCL is modelled with its published constants; from 1 MB on the median error against published "
                "tables is 1 to 14 % (docs/results/planner.md)"
            ]
            if any(row.best.engine != "nccl" for row in self.rows):
                lines.append(
                    f"GPU kernels are assumed to reach {system.device.reach:.0%} of the memory bandwidth, and dtcomm's "
                    f"messages {LINK_REACH['nccl']:.0%} of a link's: neither has been measured on several GPUs, so "
                    "gains of a codec inside an NVLink node are upper bounds"
                )
                lines.append(
                    f"a host launches a kernel of a codec in {HOST_KERNEL_US:g} us and a call in {HOST_CALL_US:g} us, "
                    "one after the other; a message takes at least that"
                )
            return lines
        if all(row.best.detail.startswith("measured") for row in self.rows):
            return []
        kind = "links have the bandwidth of their kind, and a CPU core encodes as fast as one of an EPYC"
        return [f"{kind}: `dtcomm tune` measures a machine"]

    def baseline(self, nbytes: int) -> float:
        """Return the seconds of the fastest algorithm without a codec."""
        none = parse("none")
        names = candidates(self.collective, none, self.system)
        return min((candidate.seconds for candidate in self.estimates(names, none, nbytes)), default=0.0)

    def pays_from(self, codec: Codec, names: Sequence[str] | None = None) -> int | None:
        """Return the smallest size in bytes (to a sixteenth) from which the codec pays; None if it never does."""
        names = candidates(self.collective, codec, self.system) if names is None else names

        def pays(nbytes: int) -> bool:
            times = [candidate.seconds for candidate in self.estimates(names, codec, nbytes)]
            return bool(times) and self.baseline(nbytes) > MIN_SPEEDUP * min(times)

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


def run_sweep(
    system: System, collective: str, sizes: Sequence[int], codecs: Sequence[str],
    algorithms: Sequence[str] = ("auto",), dtype: torch.dtype = torch.float32, table: Table = UNMEASURED,
) -> Sweep:  # fmt: skip
    """Estimate every size with ``none`` and each of ``codecs``.

    ``algorithms`` are ``auto`` for one row per size and codec, the fastest algorithm; otherwise ``all`` or names, for a
    row per algorithm. ``table`` has measured times of this machine.
    """
    parsed = with_none(codecs)
    sweep = Sweep(system=system, collective=collective, table=table, dtype=dtype)
    names = {codec: requested_algorithms(sweep, codec, algorithms) for codec in parsed}
    sweep.add_rows(sizes, names, every="auto" not in algorithms)
    for codec in parsed[1:]:
        sweep.break_even[str(codec)] = sweep.pays_from(codec, names[codec])
        sweep.verdicts.append(_verdict(sweep, str(codec)))
    return sweep


def with_none(specs: Sequence[str]) -> list[Codec]:
    """Return ``none``, then every other codec of ``specs`` once."""
    return [parse("none"), *dict.fromkeys(codec for codec in map(parse, specs) if codec.name != "none")]


def requested_algorithms(sweep: Sweep, codec: Codec, requested: Sequence[str]) -> tuple[str, ...]:
    """Return the algorithms to consider for a codec: ``requested`` are names, ``auto`` or ``all``."""
    collective, system = sweep.collective, sweep.system
    if set(requested) <= {"auto", "all"}:
        return candidates(collective, codec, system)
    nccl_names = nccl_model.algorithms(collective, system) if system.engine == "nccl" else ()
    own_names = registry.available(collective)
    for name in requested:
        if name not in nccl_names:
            only_nccl = (other for other in nccl_names if other not in own_names)
            registry.require(name, collective, besides=("auto", "all", *only_nccl))
    # Algorithms that only NCCL has cannot carry a codec's payloads.
    return tuple(
        name
        for name in requested
        if name.partition(":")[0] in own_names or (codec.name == "none" and name in nccl_names)
    )


def _verdict(sweep: Sweep, spec: str) -> str:
    break_even = sweep.break_even[spec]
    gains: dict[int, float] = {}
    for row in sweep.rows:
        if row.best.codec == spec:
            gains[row.best.nbytes] = max(row.speedup, gains.get(row.best.nbytes, 0.0))
    where = "on the local engine" if sweep.system.engine == "memory" else "on this system"
    if not gains:
        return f"{spec}: none of the algorithms can carry it or be estimated for {sweep.system.ranks} ranks"
    paying = [size for size, gain in gains.items() if gain > MIN_SPEEDUP]
    # Where one algorithm takes over from another, a codec may pay at a size and not at a larger one.
    early = [size for size in paying if break_even is None or size < break_even]
    late = [size for size in gains if size not in paying and break_even is not None and size >= break_even]
    at = f"at {', '.join(map(size_name, early))}"
    from_there = "" if break_even is None else f"from {size_name(break_even)} on"
    if late:
        from_there += f" (not at {', '.join(map(size_name, late))})"
    if not paying and break_even is None:
        reason = "the bytes it saves are not what takes the time"
        limit = f"(gains below {MIN_SPEEDUP - 1:.0%} are not counted)"
        return f"{where} {spec} is not faster than none: {reason} {limit}"
    if not paying:
        return f"{where} {spec} does not pay at the sizes shown; it would {from_there}"
    pays = " and ".join(part for part in (at if early else "", from_there) if part)
    return f"{where} {spec} pays {pays}, up to {max(gains.values()):.2f}x at the sizes shown"


def size_name(nbytes: int) -> str:
    """Return a size such as ``1.5 MiB``, to four digits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}" if nbytes % scale else f"{nbytes // scale} {unit}"
    return f"{nbytes} B"


def time_name(seconds: float) -> str:
    """Return a time such as ``1.250 ms``, to four digits."""
    if seconds <= 0:
        return "0 us"
    if seconds >= 999.95:
        return f"{seconds:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9999 * scale:
            return f"{seconds / scale:#.4g} {unit}"
    return f"{seconds * 1e6:#.4g} us"
