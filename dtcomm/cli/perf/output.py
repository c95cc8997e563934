"""What ``dtcomm perf`` writes: the table on stdout and the progress while the benchmark runs, JSON and a plot.

The table's first columns are exactly those of nccl-tests, so that parsers of these work. `Printer` is rank 0's
progress listener: it prints each row when it is measured, and what is measured on stderr if that is a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import dtcomm
from dtcomm.cli import format_size, show_progress, styled_pyplot
from dtcomm.cli.perf.args import PerfOptions
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.runner import (
    Measurement,
    PerfReport,
    PerfRow,
    ProgressListener,
    average_bandwidths,
    unexpected_transports,
)
from dtcomm.codecs import codec
from dtcomm.system import save_figure

VERSION = 1  # of the JSON
SMALL = 64 * 1024  # bytes up to which latency matters more than bandwidth, for plots
MARKERS = "osD^vP*X<>ph8d"
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
    lines += [f"# Times are the {_statistic(options)} over the iterations", "#", "# Using devices"]
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


def _statistic(options: PerfOptions) -> str:
    """What the times of table and plot are."""
    ranks = ("rank 0", "all ranks", "the fastest rank", "the slowest rank")[options.average]
    return f"mean of {ranks}"


def _column_heads(options: PerfOptions) -> list[str]:
    time = "cputime" if options.report_cputime else "time"
    place = [(f"{time:>7}", "   (us)"), (" algbw", "(GB/s)"), (" busbw", "(GB/s)"), ("#wrong", "      ")]
    if options.per_iter:
        place += [(f"  i_{name}", "   (us)") for name in ("min", "p50", "p99", "max")]
        place.append(("  i_cv%", "    (%)"))
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
    widths = (7, 6, 6, 6) + ((7,) * 5 if options.per_iter else ())
    if measured is None:
        return "  ".join(f"{'N/A':>{width}}" for width in widths)
    timing = measured.timing
    algorithm, bus = bandwidths(COLLECTIVES[options.collective], row.size, timing.seconds, ranks)
    wrong = "N/A" if measured.check is None else f"{float(measured.check.wrong):g}"
    cells = [format_fixed(timing.seconds * 1e6, 7), format_fixed(algorithm, 6), format_fixed(bus, 6), wrong]
    if options.per_iter:
        statistics = timing.statistics
        times = (statistics.min, statistics.p50, statistics.p99, statistics.max)
        cells += [format_fixed(seconds * 1e6, 7) for seconds in times]
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
    """Prints the table; only the progress if stdout is reserved for JSON."""

    def __init__(self, options: PerfOptions) -> None:
        self._options = options
        self._steps, self._step = "", 0

    def begin(self, report: PerfReport, steps: int) -> None:
        self._print(format_header(report))
        self._steps = f" of {steps}" if steps else ""

    def step(self, description: str) -> None:
        self._step += 1
        show_progress(f"{self._step}{self._steps}: {description}")

    def rows(self, report: PerfReport, rows: list[PerfRow]) -> None:
        self._print([format_row(self._options, row, len(report.ranks)) for row in rows])

    def end(self, report: PerfReport) -> None:
        self._print(format_footer(report))

    def stop(self) -> None:
        show_progress()

    def _print(self, lines: list[str]) -> None:
        show_progress()
        if not self._options.quiet:
            print("\n".join(lines), flush=True)


def as_dict(report: PerfReport, argv: list[str]) -> dict[str, Any]:
    """Return JSON values; times in microseconds, bandwidths in GB/s (1e9 bytes), missing values null."""
    averages = average_bandwidths(report)
    return {
        "version": VERSION,
        "start_time": _time(report.started),
        "args": ["dtcomm", "perf", *argv],
        "config": _config(report),
        "results": [_result(report, row) for row in report.rows],
        "out_of_bounds": {"count": report.wrong, "okay": report.wrong == 0},
        "average_bus_bandwidth": {
            "bandwidth": sum(averages.values()) / len(averages) if averages else None,
            "variants": averages,
        },
        "end_time": _time(report.ended),
    }


def _config(report: PerfReport) -> dict[str, Any]:
    options = report.options
    step = (
        {"step_factor": options.stepfactor} if options.stepfactor > 1 else {"step_bytes": options.stepbytes}
    )
    return {
        "collective": options.collective,
        "minimum_bytes": options.minbytes,
        "maximum_bytes": options.maxbytes,
        **step,
        "warmup_iters": options.warmup_iters,
        "iterations": options.iters,
        "aggregated_iterations": options.agg_iters,
        "validation": options.check,
        "average": ("rank0", "mean", "min", "max")[options.average],
        "blocking_collectives": bool(options.blocking),
        "report_cputime": options.report_cputime,
        "ranks": len(report.ranks),
        "device": options.device,
        "graph_replays": options.cudagraph,
        "devices": [vars(rank) for rank in report.ranks],
        "backends": report.backends,
        "warnings": report.warnings,
        "gpus": report.gpus,
        "versions": report.versions,
    }


def _result(report: PerfReport, row: PerfRow) -> dict[str, Any]:
    result: dict[str, Any] = {
        "size": row.size,
        "count": row.count,
        "type": row.datatype,
        "redop": row.op,
        "root": row.root,
        "backend": row.variant.backend,
        "codec": row.variant.codec,
        "algorithm": row.variant.algorithm,
        "wire_bytes": row.wire_bytes,
        "moved_by": None if row.transport is None else row.transport.name,
        "moved_why": None if row.transport is None else row.transport.reason,
        "ratio": _finite(row.ratio),
        "ratios": row.ratios,
    }
    for place, measured in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        result[place] = None if measured is None else _measured(report, row, measured)
        if measured is not None:
            result[f"{place}_per_iter"] = _per_iteration(measured)
    return result


def _measured(report: PerfReport, row: PerfRow, measured: Measurement) -> dict[str, Any]:
    collective = COLLECTIVES[report.options.collective]
    seconds, check = measured.timing.seconds, measured.check
    algorithm, bus = bandwidths(collective, row.size, seconds, len(report.ranks))
    return {
        "cpu_time" if report.options.report_cputime else "time": seconds * 1e6,
        "alg_bw": algorithm,
        "bus_bw": bus,
        "nwrong": None if check is None else check.wrong,
        "max_error": None if check is None else _finite(check.max_error),
        "mean_error": None if check is None else _finite(check.mean_error),
    }


def _per_iteration(measured: Measurement) -> dict[str, Any]:
    statistics = measured.timing.statistics
    times = {f"{name}_us": value * 1e6 for name, value in vars(statistics).items()}
    return {
        **times,
        "cv_pct": statistics.variation,
        "times_us": [t * 1e6 for t in measured.timing.iterations],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def plot_lines(report: PerfReport) -> dict[str, list[PerfRow]]:
    """Return the rows of each line by its label; labels leave out what does not differ between lines."""
    fields = [_label_fields(row) for row in report.rows]
    # Peers have no codec and no algorithm, so these two fields are compared over dtcomm's rows only.
    with_codec = [
        row_fields
        for row, row_fields in zip(report.rows, fields, strict=True)
        if row.variant.algorithm != "own"
    ]
    distinct = [
        len({row_fields[part] for row_fields in (with_codec if part in (1, 2) else fields)})
        for part in range(6)
    ]
    lines: dict[str, list[PerfRow]] = {}
    for row, row_fields in zip(report.rows, fields, strict=True):
        is_peer = row.variant.algorithm == "own"
        label = [
            row_fields[part] for part in range(6) if distinct[part] > 1 and not (is_peer and part in (1, 2))
        ]
        lines.setdefault(" ".join(label) or row.variant.backend, []).append(row)
    return {label: sorted(rows, key=lambda row: row.size) for label, rows in lines.items()}


def _label_fields(row: PerfRow) -> tuple[str, ...]:
    variant = row.variant
    backend = "dtcomm" if variant.backend == "native" else variant.backend
    return backend, variant.codec, variant.algorithm, row.datatype, row.op, f"root {row.root}"


def write_plot(report: PerfReport, path: Path) -> None:
    """Write the plot in the format of the path's extension: the table's numbers, in place if that was measured."""
    series = plot_lines(report)
    small = {name: [row for row in rows if 0 < row.size <= SMALL] for name, rows in series.items()}
    panels = 2 if any(len(rows) > 1 for rows in small.values()) else 1
    ranks, collective = len(report.ranks), report.options.collective

    def seconds(row: PerfRow) -> float:
        return row.primary.timing.seconds

    def bandwidth(row: PerfRow) -> float:
        return bandwidths(COLLECTIVES[collective], row.size, seconds(row), ranks)[1]

    with styled_pyplot() as pyplot:
        colours = pyplot.get_cmap("tab10").colors
        figure, all_axes = pyplot.subplots(
            1, panels, figsize=(1 + 5.4 * panels, 4.4), layout="constrained", squeeze=False
        )
        _plot_panel(all_axes[0][0], series, colours, bandwidth)
        all_axes[0][0].set_ylabel("bus bandwidth, GB/s (1e9 bytes)")
        all_axes[0][0].set_title(f"{collective}, {ranks} ranks, {_statistic(report.options)}")
        if panels == 2:
            _plot_panel(all_axes[0][1], small, colours, lambda row: seconds(row) * 1e6)
            all_axes[0][1].set_ylabel("time, µs")
            all_axes[0][1].set_title(f"up to {format_size(SMALL)}B")
        if len(series) > 1:
            figure.legend(
                *all_axes[0][0].get_legend_handles_labels(), loc="outside right upper", frameon=False
            )
        save_figure(figure, path)
        pyplot.close(figure)


def _plot_panel(axes: Any, series: dict[str, list[PerfRow]], colours: Sequence[Any], value: Any) -> None:
    for number, (name, rows) in enumerate(series.items()):
        points = [(row.size, value(row)) for row in rows if row.size > 0]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                label=name,
                color=colours[number % len(colours)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                linewidth=1.4,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: format_size(round(size)) if size >= 1 else "")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("size, bytes")
    axes.grid(which="major")
