"""The files and folders that documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "bench" / "README.md"]
# `dtcomm/env.py`, `csrc/codec/*.h`, `tests/unit`; not `dtcomm/cli/<command>/`.
PATH = re.compile(r"`((?:dtcomm|csrc|tests|bench|docs|examples|cmake)/[\w./*-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    missing = [
        name
        for name in PATH.findall(page.read_text(encoding="utf-8"))
        if not name.startswith("docs/reference/_generated") and not any(ROOT.glob(name.rstrip("/")))
    ]
    assert not missing
