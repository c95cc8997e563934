"""Result files and tables."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def write(
    name: str, result: dict[str, Any], path: str | os.PathLike[str] | None = None, *, lines: str = ""
) -> Path:
    """Writes ``bench/results/<name>.json``, or ``path``, with the time of writing; returns where.

    ``lines`` names the mapping in ``result`` whose entries get a line each, however long: curves, that would be ten
    thousand lines if they were indented.
    """
    out = Path(path) if path else RESULTS / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    stamped = {"program": name, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **result}
    entries = stamped.pop(lines) if lines else {}
    text = json.dumps(stamped, indent=1)
    if lines:
        each = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        head = text.removesuffix("\n}")
        text = f'{head},\n "{lines}": {{\n{each}\n }}\n}}'
    out.write_text(text + "\n", encoding="utf-8")
    return out


def size_name(size: int) -> str:
    """1024 -> ``1 KB``; powers of 1024, in the words of the README."""
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def parse_size(text: str) -> int:
    """``64K`` -> 65536."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if scale > 1 else text) * scale


def microseconds(seconds: float) -> str:
    """Three significant digits."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints with rich where it is installed, else in plain columns; the first column is left-aligned."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
        print(title)
        for row in [columns, *rows]:
            cells = [
                str(c).ljust(w) if i == 0 else str(c).rjust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells))
        return
    shown = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(str(cell) for cell in row))
    # A pipe has no width of its own; cutting cells would lose figures.
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(shown)
