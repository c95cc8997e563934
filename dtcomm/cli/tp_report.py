"""What ``dtcomm tp calibrate`` shows: errors by layer and codec, the plan, the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtcomm.cli.demo.plot import COLOURS, STYLE
from dtcomm.tp.calibrate import Calibration


def lines(found: Calibration) -> tuple[list[str], list[list[str]]]:
    """Columns, and a row a layer: relative error of its output and change of perplexity in each codec, what it got."""
    specs = [spec for spec in found.bits if spec != "none"]
    rows = []
    for name, errors in found.errors.items():
        cells = [
            f"{100 * errors[spec].relative:.2g} % / {100 * errors[spec].perplexity:+.2g} %" for spec in specs
        ]
        rows.append([name, *cells, str(found.layers[name].codec)])
    return ["layer", *(f"{spec} ({found.bits[spec]:.3g} bits)" for spec in specs), "plan"], rows


def words(found: Calibration) -> list[str]:
    """The plan in sentences."""
    change = found.plan_error
    said = [
        f"{found.ranks} ranks, {found.tokens} tokens, uncompressed perplexity {found.perplexity:.4f}; with the plan "
        f"{100 * change.perplexity:+.3f} % (budget {100 * found.budget:g} %), logits diverge by "
        f"{change.divergence:.3g} nats a token.",
        f"{found.mean_bits:.2f} bits an element on the wire, mean over layers; {found.bits['none']:g} uncompressed.",
    ]
    spent = {name: found.bits[str(found.layers[name].codec)] for name in found.errors}
    widest = [name for name, bits in spent.items() if bits == max(spent.values())]
    if not found.high_precision and len(widest) < len(spent):
        said.append(f"Widest, because most sensitive: {', '.join(widest)}.")
    if found.high_precision:
        said.append(f"Stay at high precision: {', '.join(found.high_precision)}.")
    return said


def show(found: Calibration) -> None:
    """Print table and sentences."""
    columns, rows = lines(found)
    title = "relative error of a layer's output / change of perplexity, that layer alone compressed"
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
        print(title)
        for row in (columns, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    else:
        shown = Table(title=title, title_justify="left")
        for at, column in enumerate(columns):
            shown.add_column(column, justify="right" if 0 < at < len(columns) - 1 else "left")
        for row in rows:
            shown.add_row(*row)
        console = Console()
        (console if console.is_terminal else Console(width=200)).print(shown)
    print("\n".join(words(found)))


def plot(found: Calibration, path: Path) -> None:
    """Divergence of the logits for each layer and codec; a ring around what the plan takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(found.errors)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(8, 1.6 + 0.28 * len(names)), layout="constrained")
        for colour, spec in zip(COLOURS[1:] * 3, [spec for spec in found.bits if spec != "none"]):
            values = [max(found.errors[name][spec].divergence, 1e-9) for name in names]
            axes.scatter(values, range(len(names)), s=26, color=colour, label=spec, zorder=3)
            taken: list[Any] = [
                (value, at)
                for at, (name, value) in enumerate(zip(names, values, strict=True))
                if found.layers[name].codec == spec
            ]
            if taken:
                across, down = zip(*taken, strict=True)
                axes.scatter(across, down, s=110, facecolors="none", edgecolors=colour, zorder=3)
        axes.set_xscale("log")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(visible=True)
        axes.set_xlabel("divergence of the logits, nats a token, that layer alone compressed")
        axes.set_title(f"rings: the plan within {100 * found.budget:g} % of perplexity, {found.ranks} ranks")
        figure.legend(loc="outside right upper", frameon=False, fontsize=8.5)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
