"""Tables as plain text and as tables of rich, for reports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return the lines of a table; the columns in ``left`` are left-aligned, the others right-aligned."""
    table = [head, *rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def rich_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> Any:
    """Return the same as a ``rich.table.Table``; rich is imported here, since only its users call this."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column, name in enumerate(head):
        table.add_column(name, justify="left" if column in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def rich_group(*parts: Any) -> Any:
    """Return tables and lines below each other."""
    from rich.console import Group

    return Group(*parts)
