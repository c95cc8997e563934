"""The tables of the README and of docs/ say what the kept results say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.pages import PAGES, between_marks


@pytest.mark.parametrize(
    ("page", "marks", "text", "programs"), PAGES, ids=[marks for _, marks, _, _ in PAGES]
)
def test_a_page_says_what_was_measured(
    page: Path, marks: str, text: Callable[..., str], programs: tuple[str, ...]
) -> None:
    written = page.read_text(encoding="utf-8")
    between = written.split(f"<!-- {marks}:begin -->")[1].split(f"<!-- {marks}:end -->")[0]
    assert between.strip() == between_marks(text, programs).strip(), "python -m bench.pages writes it anew"
