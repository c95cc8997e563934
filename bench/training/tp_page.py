"""The accuracy tables and plots of docs/results/tensor-parallel.md."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from bench.common.pages import markdown
from dtcomm.cli._plot import COLOURS, INK, STYLE

#: The names of the result file and of the table of a model of `bench.training.gpt`.
RESULTS = {"gpt": "tp_accuracy", "text": "tp_accuracy_text"}
WIDTHS = tuple(f"int{bits}" for bits in range(2, 9))
MARKERS = "DsP^v*Xp"  # not as many as there are colours, so that no two codecs have the same marker in the same colour


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the table and a line for each codec."""
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    by_case = {(row["codec"], row["ranks"]): row for row in rows}
    lines = []
    for spec in dict.fromkeys(row["codec"] for row in rows):
        bits = dict.fromkeys(f"{row['bits']:g}" for row in rows if row["codec"] == spec)
        line = [spec, " / ".join(bits)]  # a calibrated plan has others for each number of ranks
        for count in ranks:
            row = by_case.get((spec, count))
            if row is None:
                line += ["–", "", ""]
            else:
                less = f"{row['less_than_bf16']:.2f}x"
                line += [f"{row['perplexity']:.4f}", f"{round(100 * row['change'], 3) + 0.0:+.3f} %", less]
        lines.append(line)
    columns = ["codec", "bits an element"]
    for count in ranks:
        columns += [f"TP={count}", "change", "less than bf16"]
    return columns, lines


def text(result: dict[str, Any]) -> str:
    """Return an accuracy table of docs/results/tensor-parallel.md."""
    return markdown(*table(result["rows"]), aligned=True)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the change of perplexity over bits per element: a panel for each number of ranks, a line for each method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = list(dict.fromkeys(row["ranks"] for row in rows))
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(
            1,
            len(counts),
            figsize=(4.4 * len(counts) + 2.6, 4.2),
            sharey=True,
            layout="constrained",
            squeeze=False,
        )
        for axes, ranks in zip(panels[0], counts, strict=True):
            series: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                if row["ranks"] == ranks and " " not in row["codec"]:
                    name, _, added = row["codec"].partition(":")
                    line = name in WIDTHS and "symmetric" not in added
                    kind = f"int2 to int8 {_words(added)}".strip() if line else row["codec"]
                    series.setdefault(kind, []).append(row)
            alone = 0
            for colour, (kind, points) in zip(itertools.cycle(COLOURS), series.items()):
                alone += len(points) == 1
                points = sorted(points, key=lambda row: float(row["bits"]))
                axes.plot(
                    [row["bits"] for row in points],
                    [max(100 * row["change"], 1e-3) for row in points],
                    marker="o" if len(points) > 1 else MARKERS[alone % len(MARKERS)],
                    markersize=4 if len(points) > 1 else 6,
                    color=colour,
                    label=kind,
                )
            for limit in (0.1, 1.0):
                axes.axhline(limit, color=INK, linewidth=0.7, linestyle=":")
            axes.set_yscale("log")
            axes.set_title(f"{ranks} ranks")
            axes.set_xlabel("bits an element, all overheads counted")
            axes.grid(visible=True)
        panels[0][0].set_ylabel("perplexity above uncompressed, %")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8.5)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _words(added: str) -> str:
    return added.replace("rotate=hadamard", "rotated").replace("spikes=1", "with spikes").replace(",", ", ")
