"""``dtcomm plan --memory``: memory of a model on each rank for every stage of sharding, and what compression adds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dtcomm.cli.plan.options import Options
from dtcomm.planner.memory_model import ModelSize, RankMemory, memory_table

COLUMNS = ("parameters", "optimizer", "gradients", "passing", "residuals", "references", "total")
WIDTH = 146
NOTE = (
    "passing: gathered units during their computation, their gradients, and DDP's buckets. references: the peers' copy "
    "of the parameters, only with delta:. Activations and the engine's buffers are not included."
)


def main(options: Options) -> int:
    """Print the table or write the JSON; return 0."""
    assert options.memory is not None
    ranks = options.system.ranks
    rows = memory_table(options.memory, ranks)
    if options.json is not None:
        text = json.dumps(as_dict(options.memory, ranks, rows), indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
            return 0
        Path(options.json).write_text(text)
    show(options.memory, ranks, rows)
    return 0


def as_dict(model: ModelSize, ranks: int, rows: list[RankMemory]) -> dict[str, Any]:
    """Return JSON values: bytes on one rank, and bytes per parameter."""
    return {
        "version": 1,
        "params": model.params,
        "layers": model.layers,
        "itemsize": model.itemsize,
        "states": model.states,
        "ranks": ranks,
        "results": [{**row.as_dict(), "per_parameter": round(row.total / model.params, 4)} for row in rows],
    }


def show(model: ModelSize, ranks: int, rows: list[RankMemory]) -> None:
    """Print the table."""
    console = Console()
    if console.width < WIDTH:
        console = Console(width=WIDTH, file=console.file)
    console.print(
        f"{model.params:.3g} parameters of {model.itemsize} bytes in {model.layers} layers on {ranks} ranks, "
        f"{model.states} states each: GB (1e9) on a rank",
        highlight=False,
    )
    made = Table()
    for name in ("stage", "residuals kept", "parameters sent"):
        made.add_column(name, no_wrap=True)
    for name in (*COLUMNS, "bytes/parameter"):
        made.add_column(name, justify="right")
    last = ""
    for row in rows:
        if last and last != row.stage:
            made.add_section()
        made.add_row(
            row.stage if row.stage != last else "",
            row.feedback,
            "delta:" if row.delta else "whole" if row.stage != "ddp" else "-",
            *(_gigabytes(getattr(row, name)) for name in COLUMNS),
            f"{row.total / model.params:.2f}",
        )
        last = row.stage
    console.print(made)
    console.print(NOTE, style="dim", highlight=False)


def _gigabytes(size: float) -> str:
    return "-" if not size else f"{size / 1e9:.3g}"
