"""The language of the manual: short sentences, standard terms, and nothing that speaks to the authors.

All pages are checked but the specifications of formats. Users' pages are those without how-it-works and the
reference; they name nothing that only authors know. On result pages a paragraph that begins with "Measured" or
"Source:" says where figures come from, and may name commits and programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_SENTENCE = 34  # words


PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.name.endswith("-format.md")),
]

# What speaks to the authors: (pattern, what to do instead). These look at prose and inline code.
FOR_AUTHORS = {
    r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b": "name no commit",
    r"\b[Gg]oals?\b|\b(?:[Tt]he|[Oo]ur) targets?\b": "give the figure, not a goal",
    r"\bMISS(?:ED|ES)?\b|\bPASS(?:ED|ES)?\b|\bunits are kept\b": "give the figure, not a verdict",
    r"\btests/[\w/*.]+|\btest_\w+\.py\b": "name no test",
    r"python -m (?:bench|tests)\b": "name no program of bench/ or tests/",
    r"\bat hand\b|\bwhen this (?:page )?was written\b": "say what was tested, without its story",
}
# Odd words, and what to write.
_UNIT = (
    r"(?:ms|µs|us|ns|s|bits?|bytes?|seconds|[KMG]i?B|tokens?|messages|kernels|calls|Gbit|Mbit|FLOPs|samples)"
)
_PER = r"an? (?:step|rank|element|worker|row|token|host|bucket|GPU|layer|parameter|message|block|average)"
ODD_WORDS = {
    r"\bbeside\b": "compared with, against; next to (for places)",
    rf"\b[1-9][\d.,]*\s*{_UNIT}? {_PER}\b(?! (?:is|sends|has|receives|holds|needs|keeps|that)\b)": "per step, per rank",
    rf"\b{_UNIT} {_PER}\b(?=[.,;:)|]|$| (?:of|and|or|in|on|with|for|instead)\b)": "per step, per rank",
    r"\b(?:[Oo]ne|[Tt]wo) shots?\b": "one-shot, two-shot",
    r"\btravel(?:s|led|ling)?\b": "is sent",
    r"\bdestroy(?:s|ing)? (?:what|their)\b": "codecs that lose more than 20 %",
    r"\brefused by name\b": "raises an error that names it",
    r"\b[Uu]nlike links?\b": "links of different speed",
    r"\b[Uu]neven ranks?\b": "slow ranks",
    r"\balike\b|\bin turns\b": "in the same way, equal; alternating",
    r"\bto the bit\b": "bit-identical",
    r"\bmend(?:s|ed|ing)?\b": "fixed",
    r"\bcut off\b": "timed out, stopped",
    r"\bsilently\b": "without an error, without a warning",
    r"\blikewise\b|\bthereby\b|\bhereof\b|\bthe latter\b": "a plain word",
}

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence) *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|et al|No)\.")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each paragraph, list item, heading and cell of a table of a Markdown page."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    lines = _FENCE.sub(blank, _COMMENT.sub(blank, text)).split("\n")
    start, collected = 0, ""
    for number, line in enumerate([*lines, ""], 1):
        stripped = line.strip()
        begins = bool(re.match(r"[-*+] |\d+\. |#|:::|> ?|: ", stripped)) or stripped.startswith("|")
        if collected and (not stripped or begins):
            yield start, collected
            collected = ""
        if stripped.startswith("|"):
            cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", stripped)[1:-1])
            yield from ((number, cell) for cell in cells if not re.fullmatch(r"[-: ]*", cell))
        elif stripped and not stripped.startswith(":::"):
            start = start if collected else number
            collected = f"{collected} {stripped.lstrip('#>*+ ')}".strip()


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph into sentences. A piece of inline code is one word, and a link is its text."""
    plain = _LINK.sub(r"\1", paragraph)
    plain = re.sub(r"``.+?``|`[^`]+`", "CODE", plain)
    plain = _ABBREVIATION.sub("abbreviation", plain.replace("**", ""))
    return [part for part in re.split(r"(?<=[.!?])[)\"”]?\s+|(?<=[.!?])$", plain) if part.strip()]


def words(sentence: str) -> int:
    """Count the words of a sentence. Signs and numbers that stand alone count too, dashes do not."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def complaints(text: str, results: bool = False, users: bool = True) -> list[tuple[int, int, str]]:
    """Return what is wrong with a page as (words of the sentence, line, what), the worst first."""
    found = []
    for line, paragraph in paragraphs(text):
        provenance = results and paragraph.startswith(("Measured", "Source:"))
        prose = _LINK.sub(r"\1", paragraph)
        words_only = re.sub(r"``.+?``|`[^`]+`", "CODE", prose)
        checks = [(prose, FOR_AUTHORS if users and not provenance else {}), (words_only, ODD_WORDS)]
        for where, patterns in checks:
            for pattern, instead in patterns.items():
                for match in re.finditer(pattern, where):
                    found.append((0, line, f"{match[0]!r}: {instead}"))
        for sentence in sentences(paragraph):
            if words(sentence) > LONGEST_SENTENCE and not provenance:
                found.append((words(sentence), line, f"{words(sentence)} words: {sentence}"))
    return sorted(found, key=lambda item: (-item[0], item[1]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_language(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    users = not name.startswith(("docs/how-it-works/", "docs/reference/"))
    found = complaints(page.read_text(encoding="utf-8"), name.startswith("docs/results/"), users)
    assert not found, "\n" + "\n".join(f"{name}:{line}: {what}" for _, line, what in found)


def test_each_report_says_where_its_figures_come_from() -> None:
    reports = [page for page in (ROOT / "docs/results").glob("*.md") if page.name != "index.md"]
    heads = {
        page.name: [text for _, text in paragraphs(page.read_text(encoding="utf-8"))][:8] for page in reports
    }
    assert len(heads) > 5
    assert [
        name for name, head in heads.items() if not any(t.startswith(("Measured", "Source:")) for t in head)
    ] == []


# Terms of dtcomm, and the pages that explain them; the glossary explains all.
TERMS = {
    "residual": "error-feedback.md",
    "payload": "encode-decode.md",
    "granule": "codec-reference.md",
    "exposed": "monitoring.md",
    "one-shot": "",
    "two-shot": "",
    "virtual rank": "",
    "memory floor": "",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_terms_are_explained_or_linked(page: Path) -> None:
    if page.parts[-2] in ("guides", "docs"):
        text = page.read_text(encoding="utf-8")
        prose = re.sub(r"``.+?``|`[^`]+`", "CODE", " ".join(paragraph for _, paragraph in paragraphs(text)))
        used = [term for term in TERMS if re.search(rf"\b{term}s?\b(?! stream)", prose, re.IGNORECASE)]
        explaining = [page.name, *re.findall(r"([\w-]+\.md)", text)]
        missing = [term for term in used if not {"glossary.md", TERMS[term]} & set(explaining)]
        assert not missing, f"link {missing} to the glossary at the first use"


LONG = " ".join(["word"] * 35)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Short. {LONG}.", "35 words"),
        (f"- {LONG[:-5]}\n  word.", "35 words"),
        (f"| head |\n|---|\n| {LONG} |", "35 words"),
        ("Measured at e89b7bdc.", "'e89b7bdc'"),
        ("The goal is 8 µs.", "'goal'"),
        ("The target is MISSED.", "'MISSED'"),
        ("As `tests/unit/test_x.py` shows.", "'tests/unit/test_x.py'"),
        ("Run `python -m bench.ddp`.", "'python -m bench'"),
        ("The loss beside plain DDP.", "'beside'"),
        ("It takes 4 bytes an element.", "'4 bytes an element'"),
        ("| ms a step |", "'ms a step'"),
        ("It costs 30 ms a step.", "'30 ms a step'"),
        ("DDP launches 5 kernels a bucket.", "'5 kernels a bucket'"),
        ("The sum takes two shots.", "'two shots'"),
        ("The payload travels.", "'travels'"),
    ],
)
def test_each_rule_finds_its_example(text: str, expected: str) -> None:
    assert any(expected in what for _, _, what in complaints(text))


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG[:-5]}.",  # 34 words
        "```sh\npython -m bench.ddp  # the goal, beside tests/unit/test_x.py\n```",
        "<!-- the goal of tests/unit -->",
        f"`{LONG}` is one word.",
        "The bytes a rank sends, a step of DDP, 2 steps. Write `beside`.",
        "A target loss of 3.5; `target=labels`; 1234567 elements; deadbeef tensors; 1e-3.",
        f"See [the page](https://example.org/{'x' * 30}/e89b7bdc1).",
        "Half an hour. First, e.g. a step, then a rank.",
    ],
)
def test_good_text_passes(text: str) -> None:
    assert complaints(text) == []


def test_provenance_may_name_commits_on_result_pages_alone() -> None:
    text = "Measured at e89b7bdc with `python -m bench.ddp`, 3 runs."
    assert complaints(text, results=True) == [] and complaints(text)


def test_the_worst_sentence_comes_first() -> None:
    found = complaints(f"{LONG}.\n\n{LONG} word word.\n\nbeside")
    assert [count for count, _, _ in found] == [37, 35, 0]
