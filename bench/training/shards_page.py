"""The convergence tables and plots of docs/results/fsdp.md, from the runs of bench.fsdp_convergence."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.common.pages import markdown
from bench.training.shards import METHODS
from dtcomm.cli._plot import COLOURS, INK, STYLE

#: The names of the result file and of the plot of a task.
RESULTS = {"gpt": "fsdp_convergence", "text": "fsdp_convergence_text"}
NEAR = 0.01  # how far from the uncompressed loss the defaults may end

Runs = dict[str, dict[str, Any]]


def key(method: str, seed: int) -> str:
    """Return the key of a run."""
    return f"{method} | seed {seed}"


def metrics(runs: Runs, method: str) -> list[float]:
    """Return the held-out losses of every seed that has run."""
    return [run["metric"] for name, run in runs.items() if name.startswith(f"{method} | ")]


def behind(runs: Runs, method: str) -> list[float]:
    """Return how much worse than the same seed uncompressed each seed ends, as a fraction."""
    gaps = []
    for name, run in runs.items():
        of_method, _, seed = name.partition(" | ")
        plain = runs.get(f"uncompressed | {seed}")
        if of_method == method and plain is not None:
            gaps.append(run["metric"] / plain["metric"] - 1)
    return gaps


def table(runs: Runs) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, columns and rows of the table, a row for each method."""
    rows = []
    for method in METHODS.values():
        values = metrics(runs, method.name)
        if not values:
            continue
        sent = statistics.fmean(
            run["sent"] for name, run in runs.items() if name.startswith(f"{method.name} | ")
        )
        gaps = behind(runs, method.name)
        half_range = f" ± {(max(values) - min(values)) / 2:.2g}" if len(values) > 1 else ""
        gap = f"{100 * statistics.fmean(gaps):+.2f} %" if gaps else ""
        between = f" ({100 * min(gaps):+.2f} to {100 * max(gaps):+.2f})" if len(gaps) > 1 else ""
        rows.append(
            [
                method.name,
                method.gradients,
                method.parameters,
                f"{100 * sent:.3g} %",
                f"{statistics.fmean(values):.4f}{half_range}",
                gap + between,
            ]
        )
    columns = ["method", "gradients", "parameters", "sent", "held-out loss", "beside uncompressed"]
    seeds = max((len(metrics(runs, method)) for method in METHODS), default=0)
    spread = ", mean ± half of the range over seeds" if seeds > 1 else ", one seed"
    return f"held-out loss in nats per symbol{spread}", columns, rows


def verdicts(runs: Runs) -> list[str]:
    """Return whether the defaults end within `NEAR` of uncompressed, in the mean over seeds."""
    lines = []
    for name in ("defaults", "int8, fp8"):
        gaps = behind(runs, name)
        if gaps:
            mean = statistics.fmean(gaps)
            word = "PASS" if mean <= NEAR else "MISS"
            lines.append(
                f"{word} {name}: {100 * mean:+.2f} % of uncompressed, the target is at most {100 * NEAR:g} %"
            )
    return lines


def text(result: dict[str, Any]) -> str:
    """Return a convergence table of docs/results/fsdp.md."""
    title, columns, rows = table(result["runs"])
    cells = [[cell.replace("none", "`none`") if cell == "none" else cell for cell in row] for row in rows]
    for row in cells:
        row[1:3] = [cell if cell.startswith("`") else f"`{cell}`" for cell in row[1:3]]
    return f"{title[0].upper()}{title[1:]}:\n\n{markdown(columns, cells)}"


def plot(runs: Runs, path: Path) -> None:
    """Plot the training loss of the first seed, and each seed's final loss beside the same seed uncompressed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = [name for name in METHODS if metrics(runs, name)]
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
        for number, name in enumerate(methods):
            curve = runs[key(name, 0)]["curve"]
            colour = COLOURS[number % len(COLOURS)]
            line = "-" if number < len(COLOURS) else "--"
            left.plot(range(len(curve)), curve, line, color=colour, linewidth=1.2, label=name)
        left.set_title("training loss, first seed")
        left.set_xlabel("steps, in fortieths of the run", color=INK)
        left.legend(frameon=False, fontsize=8)
        right.axvspan(-100 * NEAR, 100 * NEAR, color=COLOURS[0], alpha=0.2, linewidth=0)
        for row, name in enumerate(methods):
            gaps = [100 * gap for gap in behind(runs, name)]
            right.scatter(gaps, [row] * len(gaps), s=26, color=COLOURS[1], zorder=3)
        right.set_yticks(range(len(methods)), methods)
        right.invert_yaxis()
        right.set_title("held-out loss beside the same seed uncompressed, %")
        right.grid(axis="x")
        figure.suptitle("Band: 1 %, where the defaults must end.", fontsize=10, x=0.01, ha="left")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
