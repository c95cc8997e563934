"""Result files, and tables on the terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def write(name: str, result: dict[str, Any], path: str | os.PathLike[str] | None = None) -> Path:
    """Write the summary of a result to ``bench/results/<name>.json``, or ``path``, with the time; return the path."""
    out = Path(path) if path else RESULTS / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    stamped = {"program": name, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **result}
    out.write_text(format_json(summary(stamped)), encoding="utf-8")
    return out


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that a program that is killed leaves the previous or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def summary(value: Any) -> Any:
    """Return a result whose timings have only their median, quartiles and number of repetitions."""
    if isinstance(value, dict):
        dropped = ("best_us", "worst_us") if "median_us" in value else ()
        return {key: summary(entry) for key, entry in value.items() if key not in dropped}
    if isinstance(value, list | tuple):
        return [summary(entry) for entry in value]
    return value


def format_json(document: dict[str, Any]) -> str:
    """Return JSON with one line for each entry of the document's lists and mappings of lists and mappings."""
    return (
        "{\n"
        + ",\n".join(f" {json.dumps(key)}: {_format(value)}" for key, value in document.items())
        + "\n}\n"
    )


def _format(value: Any) -> str:
    entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(entry, dict | list) for entry in entries):
        return json.dumps(value)
    if isinstance(value, dict):
        lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + "\n }"
    return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"


def size_name(size: int) -> str:
    """Return ``1 KB`` for 1024; units are powers of 1024, as in the README."""
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def parse_size(text: str) -> int:
    """Return 65536 for ``64K``."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if scale > 1 else text) * scale


def microseconds(seconds: float) -> str:
    """Return microseconds with three significant digits, or as a whole number from 100 on."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich if it is installed; the first column is left-aligned."""
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
    # A pipe has no width; a wide console avoids truncated cells.
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(shown)
