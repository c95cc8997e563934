"""Generated text in the pages of docs/: replaces text between two marks, and formats tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def fill(page: Path, name: str, text: str) -> Path:
    """Puts ``text`` between the page's marks ``<!-- name:begin -->`` and ``<!-- name:end -->``; returns the page.

    ValueError where it has none.
    """
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, begin, rest = page.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{page.name}: lacks {first} or {last}")
    page.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")
    return page


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], aligned: bool = False) -> str:
    """A table; ``aligned``: all columns but the first to the right."""
    rule = "|---" + ("|---:" if aligned else "|---") * (len(columns) - 1) + "|"
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])
