"""Plot of the demo: loss curves, their differences and the bytes sent.

Also the style of all plots of the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

INK = "#2b2b33"
GREY = "#8a8a94"
#: Grey for the baseline, then colours that are distinguishable with colour blindness.
COLOURS = ("#9a9aa4", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9")

STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e8e8ec",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def plot(summary: dict[str, Any], path: Path) -> None:
    """Write a PNG of ``summary`` (see `main.summarize`); the curves are those of the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = summary["runs"]
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(11.5, 5.6), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(1.7, 1), height_ratios=(2.4, 1))
        curves = figure.add_subplot(grid[0, 0])
        _curves(curves, runs)
        _differences(figure.add_subplot(grid[1, 0], sharex=curves), runs)
        _bars(
            figure.add_subplot(grid[0, 1]),
            runs,
            [run["bytes_per_step"] / 1e6 for run in runs],
            "{:.2f}",
            "sent by each rank, MB per step",
        )
        _bars(
            figure.add_subplot(grid[1, 1]),
            runs,
            [next(iter(run["milliseconds_on_link"].values())) for run in runs],
            "{:.0f}",
            "time of these bytes on a 1 Gbit/s link, ms",
        )
        figure.suptitle(
            f"Character-level GPT on Python's standard library: {runs[0]['parameters'] / 1e6:.1f} M "
            f"parameters, {summary['ranks']} ranks, {summary['steps']} steps",
            fontsize=12.5,
            x=0.01,
            ha="left",
        )
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _curves(axes: Any, runs: list[dict[str, Any]]) -> None:
    for position, run in enumerate(runs):
        seed = next(iter(run["seeds"].values()))
        colour = COLOURS[position % len(COLOURS)]
        smooth = _smooth(seed["losses"])
        axes.plot(
            range(1, len(smooth) + 1),
            smooth,
            color=colour,
            linewidth=5 if position == 0 else 1.3,
            alpha=0.5 if position == 0 else 0.95,
            label=f"{run['name']}: {run['final_held_out_loss']:.4f}",
            zorder=2 + position,
        )
        steps, losses = zip(*seed["held_out"], strict=True)
        # Rings of decreasing size, so that equal points of several runs stay visible.
        size = 120 - 28 * min(position, 3)
        axes.scatter(steps, losses, s=size, facecolors="none", edgecolors=colour, linewidths=1.3, zorder=9)
    axes.set_ylabel("nats per character")
    axes.set_title("training loss (lines, smoothed) and held-out loss (rings)")
    axes.grid(axis="y")
    axes.set_xlim(left=0)
    axes.tick_params(labelbottom=False)
    axes.legend(title="final held-out loss", frameon=False, alignment="left")


def _differences(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Plot the smoothed training loss relative to plain DDP's at the same step, in percent."""
    plain = _smooth(next(iter(runs[0]["seeds"].values()))["losses"])
    axes.axhline(0, color=COLOURS[0], linewidth=3, alpha=0.5)
    reach = 0.02
    for position, run in enumerate(runs[1:], 1):
        smooth = _smooth(next(iter(run["seeds"].values()))["losses"])
        difference = [100 * (ours / theirs - 1) for ours, theirs in zip(smooth, plain, strict=True)]
        reach = max(reach, 1.2 * max(map(abs, difference)))
        axes.plot(range(1, len(plain) + 1), difference, color=COLOURS[position % len(COLOURS)], linewidth=1.3)
    axes.set_ylim(-reach, reach)
    axes.set_xlabel("step")
    axes.set_ylabel("%")
    axes.set_title("training loss against plain DDP")
    axes.grid(axis="y")


def _bars(axes: Any, runs: list[dict[str, Any]], values: list[float], form: str, title: str) -> None:
    places = range(len(runs))
    axes.barh(places, values, color=[COLOURS[place % len(COLOURS)] for place in places], height=0.64)
    for place, value in zip(places, values, strict=True):
        share = f"  ({value / values[0]:.0%})" if place and values[0] else ""
        axes.text(value + 0.015 * max(values), place, form.format(value) + share, va="center")
    axes.set_yticks(places, [run["name"] for run in runs])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(values))
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(title)


def _smooth(values: list[float], memory: float = 0.9) -> list[float]:
    """Return the exponential moving average with bias correction at the start."""
    smooth, weight, total = [], 0.0, 0.0
    for value in values:
        total = memory * total + (1 - memory) * value
        weight = memory * weight + (1 - memory)
        smooth.append(total / weight)
    return smooth
