"""Tables: as plain text, and as rich's for whoever prints with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def human(count: float) -> str:
    """Bytes with a binary unit: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def lined(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Lines of columns that stand under each other; those in ``left`` begin together, the others end together."""
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
    """The same as a ``rich.table.Table``; only who has rich asks for it."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column, name in enumerate(head):
        table.add_column(name, justify="left" if column in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def rich_group(*parts: Any) -> Any:
    """Tables and lines below each other."""
    from rich.console import Group

    return Group(*parts)
