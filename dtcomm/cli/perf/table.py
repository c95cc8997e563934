"""The table on stdout, and its display while the benchmark runs.

The table's first columns are exactly those of nccl-tests, so that parsers of these work. `Printer` is rank 0's
progress listener: it shows a live table if stdout is a terminal. Otherwise it prints each row when it is measured,
with a progress bar on stderr if that is a terminal.
"""

from __future__ import annotations

import sys
from typing import Any

import dtcomm
from dtcomm.cli._common import format_size
from dtcomm.cli.perf.args import PerfOptions
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.report import (
    Measurement,
    PerfReport,
    PerfRow,
    ProgressListener,
    average_bandwidths,
    unexpected_transports,
)
from dtcomm.codecs import codec

_TRANSPORT_WIDTH = len("fused:double_tree")  # the column's width


def format_header(report: PerfReport) -> list[str]:
    """Return the lines above the rows: version, parameters, ranks, backends, warnings and column heads."""
    options = report.options
    step = f"{options.stepfactor}(factor)" if options.stepfactor > 1 else f"{options.stepbytes}(bytes)"
    lines = [
        f"# dtcomm {dtcomm.__version__}",
        f"# Collective test starting: {options.collective}",
        f"# minBytes {options.minbytes} maxBytes {options.maxbytes} step: {step} warmup iters: "
        f"{options.warmup_iters} iters: {options.iters} agg iters: {options.agg_iters} "
        f"validation: {options.check} average: {('rank 0', 'mean', 'min', 'max')[options.average]}"
        + (f" graph: {options.cudagraph}" if options.cudagraph else ""),
    ]
    if options.blocking:
        lines.append("# Blocking Enabled: wait for completion of each collective, barrier before the next")
    if options.per_iter:
        lines.append("# Per-Iteration Report: i_* columns are of the slowest rank in each iteration")
    lines += ["#", "# Using devices"]
    lines += [
        f"#  Rank {rank.rank:2d} Pid {rank.pid:6d} on {rank.hostname:>10} device {rank.device}"
        for rank in report.ranks
    ]
    if options.device_reason:
        lines.append(f"# Device {options.device}: {options.device_reason}")
    lines += [
        f"# Backend {name}: {description}" for name, description in report.backends.items() if description
    ]
    if len(options.variants) == 1:
        lines.append(f"# Codec {options.variants[0].codec}, algorithm {options.variants[0].algorithm}")
    lines += [f"# WARNING: {warning}" for warning in report.warnings]
    return [*lines, "#", *_column_heads(options)]


def _column_heads(options: PerfOptions) -> list[str]:
    time = "cputime" if options.report_cputime else "time"
    place = [(f"{time:>7}", "   (us)"), (" algbw", "(GB/s)"), (" busbw", "(GB/s)"), ("#wrong", "      ")]
    if options.per_iter:
        place += [
            ("  i_min", "   (us)"),
            ("  i_max", "   (us)"),
            ("  i_p99", "   (us)"),
            ("  i_cv%", "    (%)"),
        ]
    case = [("#       size", "#        (B)"), ("       count", "  (elements)"), ("    type", "        ")]
    case += [(" redop", "      "), ("  root", "      ")]
    columns = case + place + place + _dtcomm_heads(options)
    width = len("  ".join(head for head, _ in place))
    above = f"{'out-of-place':^{width}}  {'in-place':^{width}}"
    return [
        ("#" + " " * len("  ".join(head for head, _ in case)) + " " + above).rstrip(),
        "  ".join(head for head, _ in columns).rstrip(),
        "  ".join(unit for _, unit in columns).rstrip(),
    ]


def _dtcomm_heads(options: PerfOptions) -> list[tuple[str, str]]:
    heads = [("    wire", "     (B)")]
    if options.on_device:
        heads.append(("moved".rjust(_TRANSPORT_WIDTH), " " * _TRANSPORT_WIDTH))
    if _lossy(options):
        heads += [("   maxerr", "         "), ("  meanerr", "         ")]
    if len(options.variants) > 1:
        width = _variant_width(options)
        names = [f"vs {peer}" for peer in options.compare] or ["ratio"]
        heads += [
            *((name.rjust(7), " " * max(7, len(name))) for name in names),
            ("variant".ljust(width), " " * width),
        ]
    return heads


def format_row(options: PerfOptions, row: PerfRow, ranks: int) -> str:
    """Return one line of the table."""
    cells = [f"{row.size:12d}  {row.count:12d}  {row.datatype:>8}  {row.op:>6}  {row.root:6d}"]
    cells += [
        _measurement_cells(options, row, measured, ranks) for measured in (row.out_of_place, row.in_place)
    ]
    cells.append(f"{'N/A' if row.wire_bytes is None else row.wire_bytes:>8}")
    if options.on_device:
        cells.append(f"{'N/A' if row.transport is None else row.transport.name:>{_TRANSPORT_WIDTH}}")
    if _lossy(options):
        cells += [f"{_largest_error(row, 'max_error'):>9}", f"{_largest_error(row, 'mean_error'):>9}"]
    if len(options.variants) > 1:
        ratios = {f"vs {peer}": row.ratios.get(peer) for peer in options.compare} or {"ratio": row.ratio}
        cells += [
            ("N/A" if ratio is None else format_fixed(ratio, 7)).rjust(max(7, len(name)))
            for name, ratio in ratios.items()
        ]
        cells.append(f"{row.variant!s:<{_variant_width(options)}}")
    return "  ".join(cells).rstrip()


def format_footer(report: PerfReport) -> list[str]:
    """Return the lines below the rows: wrong values and the mean busbw of each variant, as in nccl-tests."""
    verdict = "FAILED" if report.wrong else "OK"
    lines = [f"# {'Out of bounds values':<20} : {report.wrong} {verdict}"]
    averages = average_bandwidths(report)
    for variant, bandwidth in averages.items():
        name = f" ({variant})" if len(averages) > 1 else ""
        lines.append(f"# {'Avg bus bandwidth':<20} : {bandwidth:g}{name}")
    lines += [
        f"# {variant} used {transport.name}: {transport.reason}"
        for variant, transport in unexpected_transports(report)
    ]
    return [*lines, "#", f"# Collective test concluded: {report.options.collective}"]


def format_fixed(value: float, width: int) -> str:
    """Format ``value`` in ``width`` characters with up to two decimals, or an exponent if it does not fit."""
    digits = len(str(int(value))) if value >= 1 else 0
    if digits < width - 2:
        return f"{value:.2f}"
    if digits < width - 1:
        return f"{value:.1f}"
    return f"{value:.0f}" if digits <= width else f"{value:.1e}"


def _measurement_cells(options: PerfOptions, row: PerfRow, measured: Measurement | None, ranks: int) -> str:
    widths = (7, 6, 6, 6) + ((7, 7, 7, 7) if options.per_iter else ())
    if measured is None:
        return "  ".join(f"{'N/A':>{width}}" for width in widths)
    timing = measured.timing
    algorithm, bus = bandwidths(COLLECTIVES[options.collective], row.size, timing.seconds, ranks)
    wrong = "N/A" if measured.check is None else f"{float(measured.check.wrong):g}"
    cells = [format_fixed(timing.seconds * 1e6, 7), format_fixed(algorithm, 6), format_fixed(bus, 6), wrong]
    if options.per_iter:
        statistics = timing.statistics
        cells += [format_fixed(v * 1e6, 7) for v in (statistics.min, statistics.max, statistics.p99)]
        cells.append(format_fixed(statistics.variation, 7))
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _largest_error(row: PerfRow, which: str) -> str:
    errors = [getattr(check, which) for check in row.checks if getattr(check, which) is not None]
    return f"{max(errors):.2e}" if errors else "N/A"


def _lossy(options: PerfOptions) -> bool:
    return any(codec(variant.codec).name != "none" for variant in options.variants)


def _variant_width(options: PerfOptions) -> int:
    return max(len(str(variant)) for variant in options.variants)


class Printer(ProgressListener):
    """Prints the table; only the progress bar if stdout is reserved for JSON or CSV."""

    def __init__(self, options: PerfOptions) -> None:
        self._options = options
        self._live: LiveTable | None = None
        self._bar: Any = None
        self._task: Any = None

    def begin(self, report: PerfReport, steps: int) -> None:
        self._print(format_header(report))
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

    def rows(self, report: PerfReport, rows: list[PerfRow]) -> None:
        if self._live is not None:
            self._live.draw()
            return
        lines = [format_row(self._options, row, len(report.ranks)) for row in rows]
        if self._bar is None:
            self._print(lines)
            return
        self._bar.advance(self._task, len(rows))
        self._bar.stop()  # so that the rows do not mix with the bar
        self._print(lines)
        self._bar.start()

    def end(self, report: PerfReport) -> None:
        live = self._live
        self.stop()
        if live is not None:
            self._print([format_row(self._options, row, len(report.ranks)) for row in report.rows])
        self._print(format_footer(report))

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

    def __init__(self, report: PerfReport, steps: int, console: Any) -> None:
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
            cells.append(_coloured_wrong(row))
            cells += [_coloured_ratio(row, peer) for peer in peers]
            table.add_row(*cells)
        return table

    def _place(self, row: PerfRow, measured: Measurement | None) -> list[str]:
        if measured is None:
            return ["", ""]
        seconds = measured.timing.seconds
        collective = COLLECTIVES[self._report.options.collective]
        bus = bandwidths(collective, row.size, seconds, len(self._report.ranks))[1]
        return [format_fixed(seconds * 1e6, 7), format_fixed(bus, 6)]


def make_live_table(report: PerfReport, steps: int) -> LiveTable | None:
    """Return a live table, or None if stdout is not a terminal or rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    return LiveTable(report, steps, console) if console.is_terminal else None


def _coloured_wrong(row: PerfRow) -> str:
    count = sum(check.wrong for check in row.checks)
    return "" if not row.checks else f"[red]{count}[/red]" if count else "0"


def _coloured_ratio(row: PerfRow, peer: str) -> str:
    ratio = row.ratios.get(peer)
    if ratio is None or row.variant.backend == peer:
        return ""
    return f"[{'green' if ratio >= 1 else 'yellow'}]{ratio:.2f}x[/]"
