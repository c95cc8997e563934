"""The generated tables and the plot of docs/results/convergence.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.common.pages import DOCS, markdown
from bench.training.runs import METHODS
from bench.training.tasks import TASKS
from dtcomm.cli._plot import COLOURS, INK, STYLE

#: Methods that must be as good as uncompressed.
HELD_TO_IT = ("fp16", "bf16", "fp8_e4m3", "int8", "int4")

Runs = dict[str, dict[str, Any]]
Table = tuple[str, list[str], list[list[str]]]


def key(task: str, method: str, feedback: bool, seed: int) -> str:
    """Return the key of a run in a loop."""
    return f"{task} | {method} | {'feedback' if feedback else 'no feedback'} | seed {seed}"


def ddp_key(task: str, method: str) -> str:
    """Return the key of a run as DDP."""
    return f"{task} | {method} | DDP"


def metrics(runs: Runs, task: str, method: str, feedback: bool = True) -> list[float]:
    """Return the metric of every seed that has run."""
    start = key(task, method, feedback, 0)[:-1]
    return [run["metric"] for name, run in runs.items() if name.startswith(start)]


def training_loss(run: dict[str, Any]) -> float:
    """Return the final training loss of a run, which may be one of an earlier call without its curve."""
    return float(run["curve"][-1] if "curve" in run else run["final_training_loss"])


def cell(values: list[float]) -> str:
    """Return the mean and half of the range over seeds."""
    if not values:
        return "–"
    return f"{statistics.fmean(values):.4g} ± {(max(values) - min(values)) / 2:.2g}"


def tables(runs: Runs) -> list[Table]:
    """Return the table of the methods on all tasks, and the one of the runs as DDP."""
    tasks = [task for task in TASKS.values() if metrics(runs, task.name, "none")]
    columns = ["method"]
    for task in tasks:
        columns += [f"{task.name}: sent", "with feedback", "without"]
    rows = []
    for method in METHODS.values():
        row = [method.name]
        for task in tasks:
            sent = [
                run["sent"]
                for name, run in runs.items()
                if name.startswith(f"{task.name} | {method.name} | f")
            ]
            row.append(f"{100 * sent[0]:.3g} %" if sent else "–")
            row.append(cell(metrics(runs, task.name, method.name)))
            row.append("" if method.alone else cell(metrics(runs, task.name, method.name, False)))
        rows.append(row)
    result = [("final metric, mean ± half of the range over seeds", columns, rows)]
    ddp = []
    for method in METHODS.values():
        run = runs.get(ddp_key("mlp", method.name))
        loop = runs.get(key("mlp", method.name, True, 0))
        if run and loop:
            guard = ", ".join(f"{kind} {count}x" for kind, count in run["guard"].items()) or "silent"
            if method.every or method.name == "none":
                guard = "–"
            final = f"{training_loss(run):.4f}", f"{training_loss(loop):.4f}"
            ddp.append([method.name, *final, f"{run['metric']:.3g}", f"{loop['metric']:.3g}", guard])
    if ddp:
        head = ["method", "DDP: training loss", "in a loop", "DDP: held-out error, %", "in a loop", "guard"]
        result.append(("perceptron, seed 0, as DDP in four processes", head, ddp))
    return result


def verdicts(runs: Runs) -> list[str]:
    """Return whether the methods in `HELD_TO_IT` are as good as uncompressed: their mean against its worst seed."""
    lines = []
    for task in TASKS.values():
        plain = metrics(runs, task.name, "none")
        if len(plain) < 2:
            continue
        for method in HELD_TO_IT:
            values = metrics(runs, task.name, method)
            if values:
                mean = statistics.fmean(values)
                verdict = "PASS" if mean <= max(plain) else "MISS"
                lines.append(
                    f"{verdict} {task.name} {method}: {mean:.4g}; uncompressed {min(plain):.4g} to {max(plain):.4g}"
                )
    return lines


def text(result: dict[str, Any]) -> str:
    """Return the tables of docs/results/convergence.md."""
    parts = []
    for title, columns, rows in tables(result["runs"]):
        parts.append(f"{title[0].upper()}{title[1:]}:\n\n{markdown(columns, rows, aligned=True)}")
    return "\n\n".join(parts)


def plot(runs: Runs, path: Path = DOCS / "results/convergence.png") -> Path:
    """Plot a row for each method and a panel for each task; the band is the range of uncompressed runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [task for task in TASKS.values() if metrics(runs, task.name, "none")]
    methods = list(METHODS.values())
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(
            1,
            len(tasks),
            figsize=(4.1 * len(tasks) + 1.5, 5.6),
            sharey=True,
            layout="constrained",
            squeeze=False,
        )
        for axes, task in zip(panels[0], tasks, strict=True):
            plain = metrics(runs, task.name, "none")
            axes.axvspan(min(plain), max(plain), color=COLOURS[0], alpha=0.3, linewidth=0)
            for place, method in enumerate(methods):
                for feedback, colour in ((True, COLOURS[1]), (False, COLOURS[3])):
                    values = metrics(runs, task.name, method.name, feedback)
                    if not values:
                        continue
                    row = place + (-0.13 if feedback else 0.13) * (not method.alone)
                    mean = statistics.fmean(values)
                    axes.plot([min(values), max(values)], [row, row], color=colour, linewidth=1.3)
                    axes.scatter(
                        [mean],
                        [row],
                        s=30,
                        zorder=3,
                        edgecolors=colour,
                        facecolors=colour if feedback else "white",
                    )
            low, high = axes.get_xlim()
            if high > 3 * low:  # methods that do not learn are far away
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
                axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
            axes.set_title(task.title)
            axes.set_xlabel(task.metric, color=INK)
            axes.grid(axis="y")
        panels[0][0].set_yticks(range(len(methods)), [method.name for method in methods])
        panels[0][0].invert_yaxis()
        panels[0][0].tick_params(axis="y", length=0)
        figure.suptitle(
            "Filled: with feedback. Hollow: without. Band: uncompressed, three seeds.",
            fontsize=11,
            x=0.01,
            ha="left",
        )
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
    return path
