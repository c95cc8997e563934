"""The tables of the README and of docs/ say what the kept results say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench import elastic_page
from bench.common import pages
from bench.common.output import RESULTS
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


CAMPAIGN = {
    "minutes": 30.2,
    "ranks": 3,
    "method": "diloco",
    "processes": 300,
    "events": {"killed": 200, "left": 90, "killed while joining": 40},
    "averages": 9000,
    "longest_average_s": 21.5,
    "losses": [2.0, 1.0, 0.5],
    "verdict": "PASS",
    "complaints": [],
    "resources": {
        "start": {"rss_kib": 204800, "descriptors": 20, "threads": 9},
        "end": {"rss_kib": 205824, "descriptors": 20, "threads": 9},
    },
}


def test_the_table_of_the_elastic_campaign() -> None:
    text = elastic_page.page(CAMPAIGN)
    assert "30 minutes, 3 ranks, diloco: of 300 processes 200 killed, 90 left" in text
    assert "| memory, MiB | 200 | 201 |" in text and "| descriptors | 20 | 20 |" in text
    assert "Verdict: PASS." in text
    assert "Verdict: MISS; threads grew by 3." in elastic_page.page(
        {**CAMPAIGN, "verdict": "MISS", "complaints": ["threads grew by 3"]}
    )


def test_the_page_holds_no_figures_of_a_campaign_that_was_not_kept() -> None:
    written = (pages.DOCS / "guides/across-sites.md").read_text(encoding="utf-8")
    between = written.split("<!-- elastic:begin -->")[1].split("<!-- elastic:end -->")[0]
    assert (RESULTS / "elastic.json").exists() != ("No run of 30 minutes has been kept" in between)
