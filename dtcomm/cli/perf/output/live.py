"""Output while the benchmark runs: a live table if stdout is a terminal, otherwise rows as they come.

`Printer` is rank 0's progress listener. Without a live table it prints each row when it is measured, with a progress
bar on stderr if that is a terminal.
"""

from __future__ import annotations

import sys
from typing import Any

from dtcomm.cli._sizes import format_size
from dtcomm.cli.perf.args import Options
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.output import table
from dtcomm.cli.perf.output.table import format_fixed
from dtcomm.cli.perf.report import Measurement, ProgressListener, Report, Row


class Printer(ProgressListener):
    """Prints the table; only the progress bar if stdout is reserved for JSON or CSV."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._live: LiveTable | None = None
        self._bar: Any = None
        self._task: Any = None

    def begin(self, report: Report, steps: int) -> None:
        self._print(table.format_header(report))
        self._live = make_live_table(report, steps) if steps != 1 and not self._options.quiet else None
        self._bar = _make_progress_bar() if steps != 1 and self._live is None else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=steps or None)
            self._bar.start()

    def step(self, description: str) -> None:
        if self._live is not None:
            self._live.step(description)
        if self._bar is not None:
            self._bar.update(self._task, description=description, refresh=True)

    def rows(self, report: Report, rows: list[Row]) -> None:
        if self._live is not None:
            self._live.draw()
            return
        lines = [table.format_row(self._options, row, len(report.ranks)) for row in rows]
        if self._bar is None:
            self._print(lines)
            return
        self._bar.advance(self._task, len(rows))
        self._bar.stop()  # so that the rows do not mix with the bar
        self._print(lines)
        self._bar.start()

    def end(self, report: Report) -> None:
        live = self._live
        self.stop()
        if live is not None:
            self._print([table.format_row(self._options, row, len(report.ranks)) for row in report.rows])
        self._print(table.format_footer(report))

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._live is not None:
            self._live.stop()
        self._bar = self._live = None

    def _print(self, lines: list[str]) -> None:
        if not self._options.quiet:
            print("\n".join(lines), flush=True)


def _make_progress_bar() -> Any:
    """Return a progress bar, or None if stderr is not a terminal or rich is not installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # a drawing thread would disturb the measurement
        redirect_stdout=False,
        redirect_stderr=False,
    )


class LiveTable:
    """Shows the newest rows that fit on the terminal, and the progress, until the full table is printed."""

    def __init__(self, report: Report, steps: int, console: Any) -> None:
        from rich.live import Live

        self._report, self._steps, self._console = report, steps, console
        self._current = ""
        # No refresh thread, which would disturb the measurement.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def step(self, description: str) -> None:
        """Show what is being measured."""
        self._current = description
        self.draw()

    def draw(self) -> None:
        """Redraw the table."""
        from rich.console import Group
        from rich.text import Text

        done = len(self._report.rows)
        of = f" of {self._steps}" if self._steps else ""
        self._live.update(
            Group(self._table(), Text(f"{done}{of} measured; now {self._current}", "dim")), refresh=True
        )

    def stop(self) -> None:
        """Remove the table."""
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
        max_rows = max(3, self._console.size.height - 4)
        for row in report.rows[-max_rows:]:
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
        return [format_fixed(seconds * 1e6, 7), format_fixed(bus, 6)]


def make_live_table(report: Report, steps: int) -> LiveTable | None:
    """Return a live table, or None if stdout is not a terminal or rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    return LiveTable(report, steps, console) if console.is_terminal else None


def _wrong(row: Row) -> str:
    count = sum(check.wrong for check in row.checks)
    return "" if not row.checks else f"[red]{count}[/red]" if count else "0"


def _ratio(row: Row, peer: str) -> str:
    ratio = row.ratios.get(peer)
    if ratio is None or row.variant.backend == peer:
        return ""
    return f"[{'green' if ratio >= 1 else 'yellow'}]{ratio:.2f}x[/]"
