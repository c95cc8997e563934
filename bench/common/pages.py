"""Generated text in the pages of docs/: replaces text between two marks, and formats tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def fill(page: Path, name: str, text: str) -> Path:
    """Replace the text between the page's marks ``<!-- name:begin -->`` and ``<!-- name:end -->``; return the page.

    Raises:
        ValueError: The page does not have the marks.
    """
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, begin, tail = page.read_text(encoding="utf-8").partition(first)
    _, end, after = tail.partition(last)
    if not begin or not end:
        raise ValueError(f"{page.name}: lacks {first} or {last}")
    page.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")
    return page


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], aligned: bool = False) -> str:
    """Return a Markdown table; ``aligned``: all columns except the first are right-aligned."""
    rule = "|---" + ("|---:" if aligned else "|---") * (len(columns) - 1) + "|"
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])
