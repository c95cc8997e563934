"""What ``dtcomm perf`` finds, and who hears of it while it is found."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from dtcomm.cli.perf.backends.base import Moved
from dtcomm.cli.perf.host import Rank
from dtcomm.cli.perf.options import Options, Variant
from dtcomm.cli.perf.timing import Timing
from dtcomm.cli.perf.verify import Verdict
from dtcomm.measure import gpu_info


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One timed and checked operation; ``verdict`` is None with -c 0, its ``wrong`` summed over the ranks.

    ``of_floor`` is the share of the memory floor, where one is known: a copy of as many bytes would take that part of
    the time.
    """

    timing: Timing
    verdict: Verdict | None
    of_floor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; ``wire_bytes`` is that of the rank which sends most, None where nobody counts;
    ``moved`` is what moved the bytes."""

    size: int
    count: int
    datatype: str
    op: str
    root: int
    variant: Variant
    wire_bytes: int | None
    out_of_place: Measurement | None
    in_place: Measurement | None
    moved: Moved | None = None
    ratio: float | None = None
    ratios: dict[str, float] = field(
        default_factory=dict
    )  # by --compare's names: their median time over this one's

    @property
    def compared(self) -> Measurement:
        """What ratios are taken of: in place where there is such a thing."""
        measured = self.in_place or self.out_of_place
        assert measured is not None
        return measured


@dataclass(kw_only=True)
class Report:
    """Everything that was found; the same on every rank, times included."""

    options: Options
    ranks: list[Rank]
    backends: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=gpu_info.versions)
    warnings: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    ended: float = 0.0

    @property
    def wrong(self) -> int:
        measured = [m for row in self.rows for m in (row.out_of_place, row.in_place) if m is not None]
        return sum(m.verdict.wrong for m in measured if m.verdict is not None)


class Listener:
    """What hears of the run as it goes on; rank 0's prints the table."""

    def begin(self, report: Report, steps: int) -> None:
        """Before the first row; ``steps`` rows will follow, 0 if nobody knows."""

    def step(self, what: str) -> None:
        """A row is about to be measured."""

    def rows(self, report: Report, rows: list[Row]) -> None:
        """All rows of one size are there."""

    def end(self, report: Report) -> None:
        """After the last row."""

    def stop(self) -> None:
        """Whatever happened, nothing will follow."""


def compared(rows: list[Row], peers: tuple[str, ...]) -> list[Row]:
    """With each row's ratios: the reference's and every peer's median time over its own."""
    if len(rows) < 2:
        return rows
    reference = next((row for row in rows if row.variant.backend == "gloo"), rows[-1])
    beside = {peer: next((row for row in rows if row.variant.backend == peer), None) for peer in peers}
    compared = []
    for row in rows:
        ratios = {peer: _ratio(theirs, row) for peer, theirs in beside.items() if theirs is not None}
        known = {peer: ratio for peer, ratio in ratios.items() if ratio is not None}
        compared.append(replace(row, ratio=_ratio(reference, row), ratios=known))
    return compared


def _ratio(reference: Row, row: Row) -> float | None:
    """Of what both were measured in: in place where they can be."""
    for theirs, ours in ((reference.in_place, row.in_place), (reference.out_of_place, row.out_of_place)):
        if theirs is not None and ours is not None:
            own = ours.timing.statistics.p50
            return theirs.timing.statistics.p50 / own if own > 0 else None
    return None
