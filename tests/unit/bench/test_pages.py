"""The tables of the README and of docs/ say what the kept results say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import slow_link
from bench.common import output
from bench.pages import PAGES, between_marks

KEPT = sorted([*output.RESULTS.glob("*.json"), *output.RESULTS.glob(f"{output.OTHER_PROCESSORS}/*.json")])


@pytest.mark.parametrize(
    ("page", "marks", "text", "programs"), PAGES, ids=[marks for _, marks, _, _ in PAGES]
)
def test_a_page_says_what_was_measured(
    page: Path, marks: str, text: Callable[..., str], programs: tuple[str, ...]
) -> None:
    written = page.read_text(encoding="utf-8")
    between = written.split(f"<!-- {marks}:begin -->")[1].split(f"<!-- {marks}:end -->")[0]
    assert between.strip() == between_marks(text, programs).strip(), "python -m bench.pages writes it anew"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_a_kept_result_counts_its_runs_and_names_commits(path: Path) -> None:
    measurements = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    assert measurements and not any(entry["commit"].endswith("-dirty") for entry in measurements)


def test_a_step_of_auto_is_shown_for_each_choice_of_the_runs() -> None:
    row = {"gbit": 1, "batch": 4, "name": "auto", "chosen": "int4", "ms": 50, "faster": 2.0}
    result = {"rows": [row, {**row, "name": "none", "faster": 1.0}, {**row, "chosen": "fp16", "faster": 1.5}]}
    text = slow_link.page(result)
    assert "| auto | 50 (2.00×: int4); 50 (1.50×: fp16) |" in text and "| none | 50 (1.00×) |" in text
    once = slow_link.page({"rows": result["rows"][:2]})
    assert "| auto | 50 (2.00×) |" in once
