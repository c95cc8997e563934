"""Plot of ``dtcomm perf``: bus bandwidth against size, and the time of small messages on a second panel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtcomm.cli._sizes import format_size
from dtcomm.cli.demo.plot import STYLE
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.report import Report, Row

SMALL = 64 * 1024  # bytes up to which latency matters more than bandwidth
MARKERS = "osD^vP*X<>ph8d"


def plot_lines(report: Report) -> dict[str, list[Row]]:
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
    lines: dict[str, list[Row]] = {}
    for row, row_fields in zip(report.rows, fields, strict=True):
        is_peer = row.variant.algorithm == "own"
        label = [
            row_fields[part] for part in range(6) if distinct[part] > 1 and not (is_peer and part in (1, 2))
        ]
        lines.setdefault(" ".join(label) or row.variant.backend, []).append(row)
    return {label: sorted(rows, key=lambda row: row.size) for label, rows in lines.items()}


def _label_fields(row: Row) -> tuple[str, ...]:
    variant = row.variant
    backend = "dtcomm" if variant.backend == "native" else variant.backend
    return backend, variant.codec, variant.algorithm, row.datatype, row.op, f"root {row.root}"


def plot(report: Report, path: Path) -> None:
    """Write the plot in the format of the path's extension; it shows medians, in place if that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = plot_lines(report)
    small = {name: [row for row in rows if 0 < row.size <= SMALL] for name, rows in series.items()}
    panels = 2 if any(len(rows) > 1 for rows in small.values()) else 1
    colours = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
    ranks, collective = len(report.ranks), report.options.collective
    with pyplot.rc_context(STYLE):
        figure, all_axes = pyplot.subplots(
            1, panels, figsize=(1 + 5.4 * panels, 4.4), layout="constrained", squeeze=False
        )
        _panel(all_axes[0][0], series, colours, lambda row: _bandwidth(row, ranks, collective))
        all_axes[0][0].set_ylabel("bus bandwidth, GB/s (1e9 bytes)")
        all_axes[0][0].set_title(f"{collective}, {ranks} ranks")
        if panels == 2:
            _panel(all_axes[0][1], small, colours, lambda row: _seconds(row) * 1e6)
            all_axes[0][1].set_ylabel("time, µs")
            all_axes[0][1].set_title(f"up to {format_size(SMALL)}B")
        if len(series) > 1:
            figure.legend(
                *all_axes[0][0].get_legend_handles_labels(), loc="outside right upper", frameon=False
            )
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _panel(axes: Any, series: dict[str, list[Row]], colours: Sequence[Any], value: Any) -> None:
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


def _seconds(row: Row) -> float:
    return row.primary.timing.statistics.p50


def _bandwidth(row: Row, ranks: int, collective: str) -> float:
    return bandwidths(COLLECTIVES[collective], row.size, _seconds(row), ranks)[1]
