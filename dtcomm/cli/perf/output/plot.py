"""The picture of ``dtcomm perf``: bus bandwidth against size, and what small messages take on an axis of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtcomm.cli._sizes import format_size
from dtcomm.cli.demo.plot import STYLE
from dtcomm.cli.perf.collectives import COLLECTIVES, bandwidths
from dtcomm.cli.perf.report import Report, Row

SMALL = 64 * 1024  # bytes, up to which time says more than bandwidth
MARKERS = "osD^vP*X<>ph8d"


def lines(report: Report) -> dict[str, list[Row]]:
    """The rows of each line by its name: what does not differ between lines is left out of the names."""
    words = [_words(row) for row in report.rows]
    ours = [each for row, each in zip(report.rows, words, strict=True) if row.variant.algorithm != "own"]
    # What only tells us from a peer, which knows neither codecs nor algorithms, is told by the backend's name.
    kinds = [len({each[part] for each in (ours if part in (1, 2) else words)}) for part in range(6)]
    found: dict[str, list[Row]] = {}
    for row, each in zip(report.rows, words, strict=True):
        plain = row.variant.algorithm == "own"
        said = [each[part] for part in range(6) if kinds[part] > 1 and not (plain and part in (1, 2))]
        found.setdefault(" ".join(said) or row.variant.backend, []).append(row)
    return {name: sorted(rows, key=lambda row: row.size) for name, rows in found.items()}


def _words(row: Row) -> tuple[str, ...]:
    variant = row.variant
    backend = "dtcomm" if variant.backend == "native" else variant.backend
    return backend, variant.codec, variant.algorithm, row.datatype, row.op, f"root {row.root}"


def plot(report: Report, path: Path) -> None:
    """Write a picture, in the format that ``path`` ends with; medians, in place where there is such a thing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = lines(report)
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
    return row.compared.timing.statistics.p50


def _bandwidth(row: Row, ranks: int, collective: str) -> float:
    return bandwidths(COLLECTIVES[collective], row.size, _seconds(row), ranks)[1]
