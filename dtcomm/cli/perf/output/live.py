"""The table as it grows, on a terminal: times and bus bandwidths out of place and in place. When all is measured it
gives way to the whole one in nccl-tests' form.
"""

from __future__ import annotations

from typing import Any

from dtcomm.cli._sizes import format_size
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.output.table import fixed
from dtcomm.cli.perf.report import Measurement, Report, Row


class LiveTable:
    """The newest rows that the terminal has room for, and how far the run is."""

    def __init__(self, report: Report, steps: int, console: Any) -> None:
        from rich.live import Live

        self._report, self._steps, self._console = report, steps, console
        self._doing = ""
        # No thread of its own: one that draws would take its time from what is measured.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def step(self, what: str) -> None:
        """Say what is being measured."""
        self._doing = what
        self.draw()

    def draw(self) -> None:
        """Show what there is."""
        from rich.console import Group
        from rich.text import Text

        done = len(self._report.rows)
        of = f" of {self._steps}" if self._steps else ""
        self._live.update(
            Group(self._table(), Text(f"{done}{of} measured; now {self._doing}", "dim")), refresh=True
        )

    def stop(self) -> None:
        """Take the table away."""
        self._live.stop()

    def _table(self) -> Any:
        from rich.table import Table

        report, options = self._report, self._report.options
        many = len(options.variants) > 1
        table = Table(box=None, header_style="bold", pad_edge=False)
        peers = list(options.compare)
        kinds = len(options.datatypes) * len(options.ops) > 1
        heads = ["size", *(["type", "op"] if kinds else []), *(["variant"] if many else [])]
        heads += ["out µs", "GB/s", "in µs", "GB/s", "wrong", *(f"vs {peer}" for peer in peers)]
        for head in heads:
            table.add_column(head, justify="left" if head == "variant" else "right", no_wrap=True)
        room = max(3, self._console.size.height - 4)
        for row in report.rows[-room:]:
            cells = [format_size(row.size), *([row.datatype, row.op] if kinds else [])]
            cells += [str(row.variant)] if many else []
            for measured in (row.out_of_place, row.in_place):
                cells += self._place(row, measured)
            cells.append(_wrong(row))
            cells += [_ratio(row, peer) for peer in peers]
            table.add_row(*cells)
        return table

    def _place(self, row: Row, measured: Measurement | None) -> list[str]:
        if measured is None:
            return ["", ""]
        seconds = measured.timing.seconds
        collective = COLLECTIVES[self._report.options.collective]
        bus = bandwidths(collective, row.size, seconds, len(self._report.ranks))[1]
        return [fixed(seconds * 1e6, 7), fixed(bus, 6)]


def make(report: Report, steps: int) -> LiveTable | None:
    """The table, or None where stdout is no terminal or rich is missing."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    return LiveTable(report, steps, console) if console.is_terminal else None


def _wrong(row: Row) -> str:
    verdicts = [
        m.verdict for m in (row.out_of_place, row.in_place) if m is not None and m.verdict is not None
    ]
    count = sum(verdict.wrong for verdict in verdicts)
    return "" if not verdicts else f"[red]{count}[/red]" if count else "0"


def _ratio(row: Row, peer: str) -> str:
    ratio = row.ratios.get(peer)
    if ratio is None or row.variant.backend == peer:
        return ""
    return f"[{'green' if ratio >= 1 else 'yellow'}]{ratio:.2f}x[/]"
