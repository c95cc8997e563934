"""Results of ``dtcomm perf`` and the interface of what displays them while they are measured."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from dtcomm import measure as device_info
from dtcomm.cli.perf.args import PerfOptions, Variant
from dtcomm.cli.perf.backend import TransportUsed
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.placement import RankInfo
from dtcomm.cli.perf.timing import Timing
from dtcomm.cli.perf.verify import CheckResult


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One timed and checked operation.

    Attributes:
        timing: Times.
        check: Result of the checks, summed over the ranks; None with -c 0.
    """

    timing: Timing
    check: CheckResult | None


@dataclass(frozen=True, kw_only=True)
class PerfRow:
    """One line of the table.

    ``wire_bytes`` is that of the rank that sends most, or None if the backend does not count. ``ratio`` and ``ratios``
    (by the names of --compare) are the reference's and the peers' median times over this row's.
    """

    size: int
    count: int
    datatype: str
    op: str
    root: int
    variant: Variant
    wire_bytes: int | None
    out_of_place: Measurement | None
    in_place: Measurement | None
    transport: TransportUsed | None = None
    ratio: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def primary(self) -> Measurement:
        """The measurement that ratios refer to: in place if there is one."""
        measurement = self.in_place or self.out_of_place
        assert measurement is not None
        return measurement

    @property
    def checks(self) -> list[CheckResult]:
        """The check results out of place and in place, if there are any."""
        measurements = (self.out_of_place, self.in_place)
        return [m.check for m in measurements if m is not None and m.check is not None]


@dataclass(kw_only=True)
class PerfReport:
    """All results; equal on all ranks, times included."""

    options: PerfOptions
    ranks: list[RankInfo]
    backends: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=device_info.versions)
    warnings: list[str] = field(default_factory=list)
    rows: list[PerfRow] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    ended: float = 0.0

    @property
    def wrong(self) -> int:
        """Number of wrong elements in all rows."""
        return sum(check.wrong for row in self.rows for check in row.checks)


class ProgressListener:
    """Notified while the benchmark runs; rank 0's listener prints the table."""

    def begin(self, report: PerfReport, steps: int) -> None:
        """Called before the first row; ``steps`` rows will follow, 0 if unknown."""

    def step(self, description: str) -> None:
        """Called before a row is measured."""

    def rows(self, report: PerfReport, rows: list[PerfRow]) -> None:
        """Called when all rows of one size have been measured."""

    def end(self, report: PerfReport) -> None:
        """Called after the last row."""

    def stop(self) -> None:
        """Called at the end, also after a failure."""


def with_ratios(rows: list[PerfRow], peers: tuple[str, ...]) -> list[PerfRow]:
    """Return the rows of one size with their ratios; the reference is gloo if measured, else the last row."""
    if len(rows) < 2:
        return rows
    by_backend: dict[str, PerfRow] = {}
    for row in rows:
        by_backend.setdefault(row.variant.backend, row)
    reference = by_backend.get("gloo", rows[-1])
    result = []
    for row in rows:
        ratios = {peer: _ratio(by_backend[peer], row) for peer in peers if peer in by_backend}
        known = {peer: ratio for peer, ratio in ratios.items() if ratio is not None}
        result.append(replace(row, ratio=_ratio(reference, row), ratios=known))
    return result


def _ratio(reference: PerfRow, row: PerfRow) -> float | None:
    """Return the ratio of median times, in place if both rows have that."""
    for theirs, ours in ((reference.in_place, row.in_place), (reference.out_of_place, row.out_of_place)):
        if theirs is not None and ours is not None:
            median = ours.timing.statistics.p50
            return theirs.timing.statistics.p50 / median if median > 0 else None
    return None


def unexpected_transports(report: PerfReport) -> list[tuple[str, TransportUsed]]:
    """Return each variant's unexpected transports, without duplicates."""
    transports = [
        (str(row.variant), row.transport)
        for row in report.rows
        if row.transport is not None and row.transport.reason
    ]
    return list(dict.fromkeys(transports)) if report.options.on_device else []


def average_bandwidths(report: PerfReport) -> dict[str, float]:
    """Return each variant's mean busbw in GB/s over sizes, out of place and in place."""
    by_variant: dict[str, list[float]] = {}
    collective = COLLECTIVES[report.options.collective]
    for row in report.rows:
        for measured in (row.out_of_place, row.in_place):
            if measured is not None:
                _, bus = bandwidths(collective, row.size, measured.timing.seconds, len(report.ranks))
                by_variant.setdefault(str(row.variant), []).append(bus)
    return {variant: sum(values) / len(values) for variant, values in by_variant.items()}
