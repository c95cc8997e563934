"""Files of ``dtcomm perf``: the report as JSON and CSV, and a plot.

The JSON has nccl-tests' keys, with values as numbers and without the environment. The plot shows bus bandwidth against
size, and on a second panel the time of small messages.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dtcomm.cli._common import format_size, styled_pyplot
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.report import Measurement, PerfReport, PerfRow, average_bandwidths

VERSION = 1


def to_json(report: PerfReport, argv: list[str]) -> str:
    """Return one JSON object; times in microseconds, bandwidths in GB/s (1e9 bytes), missing values null."""
    averages = average_bandwidths(report)
    document = {
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
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def to_csv(report: PerfReport) -> str:
    """Return one line per row, with a head; columns are the JSON's keys, with a dot for nested ones (in_place.time)."""
    lines = [_flat(_result(report, row)) for row in report.rows]
    out = io.StringIO()
    if lines:
        names = list(dict.fromkeys(name for line in lines for name in line))
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return out.getvalue()


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


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items() if name != "times_us"}
        elif value is not None or not key.endswith("place"):
            flat[key] = value
    return flat


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


SMALL = 64 * 1024  # bytes up to which latency matters more than bandwidth
MARKERS = "osD^vP*X<>ph8d"


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
    """Write the plot in the format of the path's extension; it shows medians, in place if that was measured."""
    series = plot_lines(report)
    small = {name: [row for row in rows if 0 < row.size <= SMALL] for name, rows in series.items()}
    panels = 2 if any(len(rows) > 1 for rows in small.values()) else 1
    ranks, collective = len(report.ranks), report.options.collective
    with styled_pyplot() as pyplot:
        colours = pyplot.get_cmap("tab10").colors
        figure, all_axes = pyplot.subplots(
            1, panels, figsize=(1 + 5.4 * panels, 4.4), layout="constrained", squeeze=False
        )
        _plot_panel(all_axes[0][0], series, colours, lambda row: _bandwidth(row, ranks, collective))
        all_axes[0][0].set_ylabel("bus bandwidth, GB/s (1e9 bytes)")
        all_axes[0][0].set_title(f"{collective}, {ranks} ranks")
        if panels == 2:
            _plot_panel(all_axes[0][1], small, colours, lambda row: _seconds(row) * 1e6)
            all_axes[0][1].set_ylabel("time, µs")
            all_axes[0][1].set_title(f"up to {format_size(SMALL)}B")
        if len(series) > 1:
            figure.legend(
                *all_axes[0][0].get_legend_handles_labels(), loc="outside right upper", frameon=False
            )
        figure.savefig(path, dpi=150)
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


def _seconds(row: PerfRow) -> float:
    return row.primary.timing.statistics.p50


def _bandwidth(row: PerfRow, ranks: int, collective: str) -> float:
    return bandwidths(COLLECTIVES[collective], row.size, _seconds(row), ranks)[1]
