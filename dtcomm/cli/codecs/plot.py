"""Plot of ``dtcomm codecs``: error versus bits per element, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtcomm.cli.codecs.report import Row
from dtcomm.cli.demo.plot import GREY, INK, STYLE

MARKERS = "osD^vP*X<>ph8d"


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (bits, error) that no other point beats in both coordinates, by increasing bits."""
    front: list[tuple[float, float]] = []
    for bits, error in sorted(set(points)):
        if not front or error < front[-1][1]:
            if front and front[-1][0] == bits:
                front.pop()
            front.append((bits, error))
    return front


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write a plot in the format of the path's extension, with a panel for the first and for the last sample.

    Codecs without error, and errors that do not exist, are left out of the logarithmic scale.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(rows[0].errors)
    panels = list(dict.fromkeys((names[0], names[-1])))
    families = list(dict.fromkeys(row.family for row in rows))
    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    with pyplot.rc_context(STYLE):
        figure, all_axes = pyplot.subplots(
            1, len(panels), figsize=(2 + 5.2 * len(panels), 6.4), layout="constrained", squeeze=False
        )
        for axes, name in zip(all_axes[0], panels, strict=True):
            _panel(axes, rows, families, name, colours)
        figure.draw_without_rendering()  # fixes the positions of the points, which labels need
        for axes, name in zip(all_axes[0], panels, strict=True):
            _label(axes, rows, name)
        handles, labels = all_axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _panel(
    axes: Any, rows: Sequence[Row], families: Sequence[str], name: str, colours: Sequence[Any]
) -> None:
    points = [(row, row.errors[name].relative_l2) for row in rows]
    shown = [(row, error) for row, error in points if error]
    front = _front(rows, name)
    axes.plot(*zip(*front, strict=True), color=GREY, linewidth=1, zorder=1, label="Pareto front")
    for number, family in enumerate(families):
        here = [(row.bits_per_element, error) for row, error in shown if row.family == family]
        if here:
            axes.scatter(
                *zip(*here, strict=True),
                label=family,
                color=colours[number % len(colours)],
                marker=MARKERS[number % len(MARKERS)],
                s=34,
                zorder=3,
            )
    axes.set_xscale("log", base=2)
    axes.set_xlim(right=80)  # room for labels to the right of the points
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("bits per element, with overhead")
    axes.set_ylabel("|x - y| / |x|")
    axes.set_title(f"relative error on {name}")
    axes.grid(which="major")


def _front(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    points = [(row.bits_per_element, row.errors[name].relative_l2) for row in rows]
    return pareto([(bits, error) for bits, error in points if error])


def _label(axes: Any, rows: Sequence[Row], name: str) -> None:
    """Label the codecs on the Pareto front; a label that would overlap another one is left out."""
    front = _front(rows, name)
    taken: list[tuple[float, float, float]] = []  # left, right and baseline of the labels, in points
    for row in sorted(rows, key=lambda row: len(row.spec)):
        place = (row.bits_per_element, row.errors[name].relative_l2)
        if place not in front:
            continue
        x, y = axes.transData.transform(place) * 72 / axes.figure.dpi
        left, right = x, x + 3.9 * len(row.spec)
        if all(right < a or b < left or abs(y - base) > 8 for a, b, base in taken):
            taken.append((left, right, y))
            axes.annotate(row.spec, place, xytext=(5, 4), textcoords="offset points", fontsize=7, color=INK)
