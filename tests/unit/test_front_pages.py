"""README answers a visitor's questions early, and pages agree on what has run on GPUs and on badges and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+\.(?:svg|png))\)")


def position(text: str, phrase: str) -> int:
    """Return the number of words before a phrase, without comments and the addresses of links and images."""
    plain = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    plain = re.sub(r"(!?\[[^\]]*\])\([^)]*\)", r"\1", plain)
    assert phrase in plain, phrase
    return len(plain[: plain.index(phrase)].split())


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("what is it?", "in 2 to 7 times fewer bytes"),
        ("for whom?", "for people who train over slow links"),
        ("my links?", "my set-up"),
        ("which line do I add?", "state = dtcomm.ddp.compress("),
        ("did it work?", "verdict     paid"),
    ],
)
def test_readme_answers_within_400_words(question: str, answer: str) -> None:
    assert position(README, answer) < 400, question


def test_positions_count_words() -> None:
    assert position("one [two](three) <!-- four five --> six", "six") == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_images_exist_and_badges_are_named(page: Path) -> None:
    for words, address in IMAGE.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / address).resolve()
        assert path.exists() and words, address
        if path.parent.name == "badges":
            assert words.replace(" ", "-") == path.stem, f"{address} is called {words!r}"


def test_every_picture_is_shown() -> None:
    shown = {
        (page.parent / address).resolve()
        for page in PAGES
        for _, address in IMAGE.findall(page.read_text(encoding="utf-8"))
    }
    pictures = [path for folder in ("pictures", "badges") for path in (ROOT / "docs" / folder).glob("*.svg")]
    assert len(pictures) > 8 and [path.name for path in pictures if path not in shown] == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs/pictures").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_are_small_and_their_text_is_text(path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    assert len(content) < 60_000 and content.count("<text") > 5


# Any other account of what has run contradicts the status page.
WRONG_STATUS = re.compile(r"(?<!one H100 and )\bone H(?:100|200)\b(?! and one H200)")


def test_pages_agree_on_which_gpus_have_run() -> None:
    status = (ROOT / "docs/how-it-works/gpu-status.md").read_text(encoding="utf-8")
    for text in (README, status):
        assert "one H100 and one H200, **never between two GPUs**" in " ".join(text.split())
    assert WRONG_STATUS.search("run on one H100") and not WRONG_STATUS.search("one H100 and one H200")
    wrong = [page.name for page in PAGES if WRONG_STATUS.search(page.read_text(encoding="utf-8"))]
    # The status page and the report speak of each device alone.
    assert not set(wrong) - {"gpu-status.md", "h200.md"}, wrong
