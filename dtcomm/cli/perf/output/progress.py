"""What rank 0 shows while the benchmark runs: a live table where stdout is a terminal, else the table's lines as they
come and a bar on stderr where that is one.
"""

from __future__ import annotations

import sys
from typing import Any

from dtcomm.cli.perf.options import Options
from dtcomm.cli.perf.output import live as perf_live
from dtcomm.cli.perf.output import table
from dtcomm.cli.perf.output.live import LiveTable
from dtcomm.cli.perf.report import Listener, Report, Row


class Printer(Listener):
    """Prints the table row by row; nothing but the bar where stdout is for JSON or CSV."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._live: LiveTable | None = None
        self._bar: Any = None
        self._task: Any = None

    def begin(self, report: Report, steps: int) -> None:
        self._print(table.header(report))
        self._live = perf_live.make(report, steps) if steps != 1 and not self._options.quiet else None
        self._bar = _bar() if steps != 1 and self._live is None else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=steps or None)
            self._bar.start()

    def step(self, what: str) -> None:
        if self._live is not None:
            self._live.step(what)
        if self._bar is not None:
            self._bar.update(self._task, description=what, refresh=True)

    def rows(self, report: Report, rows: list[Row]) -> None:
        if self._live is not None:
            self._live.draw()
            return
        lines = [table.row(self._options, row, len(report.ranks)) for row in rows]
        if self._bar is None:
            self._print(lines)
            return
        self._bar.advance(self._task, len(rows))
        self._bar.stop()  # the bar leaves its line, and the rows come out whole, however long they are
        self._print(lines)
        self._bar.start()

    def end(self, report: Report) -> None:
        live = self._live
        self.stop()
        if live is not None:
            self._print([table.row(self._options, row, len(report.ranks)) for row in report.rows])
        self._print(table.footer(report))

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._live is not None:
            self._live.stop()
        self._bar = self._live = None

    def _print(self, lines: list[str]) -> None:
        if not self._options.quiet:
            print("\n".join(lines), flush=True)


def _bar() -> Any:
    """A progress bar, or None where nobody would see it."""
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
        auto_refresh=False,  # a thread that draws would take its time from what is measured
        redirect_stdout=False,
        redirect_stderr=False,
    )
