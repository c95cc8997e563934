"""Plot of ``dtcomm plan``: bus bandwidth versus size, speed-up of codecs, and training steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtcomm.cli.demo.plot import COLOURS, GREY, INK, STYLE
from dtcomm.cli.plan.training import Training
from dtcomm.planner.sweep import MIN_SPEEDUP, Sweep, SweepRow, size_name


def plot(plan: Sweep, trainings: Sequence[Training], path: Path) -> None:
    """Write the plot in the format of the path's extension."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = 2 + len(trainings)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, panels, figsize=(1 + 5 * panels, 4.8), layout="constrained")
        lines = _lines(plan)
        _bandwidth(axes[0], lines)
        _gains(axes[1], plan, lines)
        for panel, training in zip(axes[2:], trainings, strict=True):
            _steps(panel, training)
        system = plan.system
        figure.suptitle(
            f"{plan.collective} on {system.ranks} ranks: {system.hosts} host(s) of {system.per_host}, {system.name}",
            x=0.01,
            ha="left",
            fontsize=12,
        )
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _lines(plan: Sweep) -> dict[str, list[SweepRow]]:
    # One line for each codec, or for each codec and algorithm if several algorithms were requested.
    several = len({(row.best.nbytes, row.best.codec) for row in plan.rows}) < len(plan.rows)
    lines: dict[str, list[SweepRow]] = {}
    for row in plan.rows:
        name = f"{row.best.codec}, {row.best.algorithm}" if several else row.best.codec
        lines.setdefault(name, []).append(row)
    return lines


def _style(at: int) -> dict[str, Any]:
    return {
        "color": COLOURS[at % len(COLOURS)],
        "marker": "os^Dv*P"[at % 7],
        "markersize": 4,
        "linewidth": 1.8,
    }


def _bandwidth(axes: Any, lines: dict[str, list[SweepRow]]) -> None:
    for at, (name, rows) in enumerate(lines.items()):
        axes.plot(
            [row.best.nbytes for row in rows], [row.best.busbw for row in rows], label=name, **_style(at)
        )
    axes.set_yscale("log")
    axes.set_ylabel("bus bandwidth, GB/s of uncompressed bytes")
    axes.set_title("predicted bus bandwidth")
    axes.legend(frameon=False, fontsize=8.5)
    _sizes(axes)


def _gains(axes: Any, plan: Sweep, lines: dict[str, list[SweepRow]]) -> None:
    for at, (name, rows) in enumerate(lines.items()):
        if rows[0].best.codec != "none":
            axes.plot(
                [row.best.nbytes for row in rows], [row.speedup for row in rows], label=name, **_style(at)
            )
    axes.axhline(1, color=GREY, linewidth=1)
    axes.axhspan(1 / MIN_SPEEDUP, MIN_SPEEDUP, color="#ececf0", zorder=0)
    low, high = axes.get_xlim()
    for spec, size in plan.break_even.items():
        if size is not None and low < size < high:
            axes.axvline(size, color=GREY, linewidth=0.8, linestyle=":")
            axes.text(
                size, axes.get_ylim()[1], f" {spec} from {size_name(size)}", fontsize=7.5, color=INK, va="top",
                rotation=90, ha="right",
            )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speed-up over the fastest without a codec")
    axes.set_title("speed-up (grey: within the estimates' error)")
    _sizes(axes)


def _sizes(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: size_name(int(value)) if value >= 1 else "")
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("size of the tensor")
    axes.grid(which="major")


def _steps(axes: Any, training: Training) -> None:
    names = [row.codec for row in training.rows]
    compute = [row.step.compute * 1e3 for row in training.rows]
    exposed = [(row.step.seconds - row.step.compute) * 1e3 for row in training.rows]
    axes.bar(names, compute, color=COLOURS[0], label="compute")
    axes.bar(names, exposed, bottom=compute, color=COLOURS[3], label="waiting for the network")
    for at, row in enumerate(training.rows):
        axes.text(
            at, row.step.seconds * 1e3, f"{row.step.efficiency:.0%}", ha="center", va="bottom", fontsize=8.5
        )
    axes.set_ylim(top=1.25 * max(row.step.seconds for row in training.rows) * 1e3)
    axes.set_ylabel("ms per step")
    axes.set_title(f"training step, scaling efficiency\n{training.title}", fontsize=9.5)
    axes.legend(frameon=False, fontsize=8.5)
