"""Write the tables of the README and of docs/ from the results in bench/results: python -m bench.pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import (
    auto_runs,
    collectives,
    compression_setups,
    elastic_page,
    fsdp_speed,
    partial_sums,
    published_runs,
    quality,
    slow_link,
    tp_speed,
    two_hosts,
    two_shot_error,
)
from bench.common import pages, readme
from bench.common.output import RESULTS

README = pages.DOCS.parent / "README.md"
# Page and marks, what makes the text between them, and the programs whose results it takes.
PAGES: list[tuple[Path, str, Callable[..., str], tuple[str, ...]]] = [
    (README, "bench", readme.readme, ("all_reduce",)),
    (README, "hosts", readme.between_hosts, ("two_hosts", "slow_link", "fsdp_speed")),
    (pages.DOCS / "results/all-reduce.md", "all_reduce", readme.readme, ("all_reduce",)),
    (pages.DOCS / "results/collectives.md", "collectives", collectives.page, ("collectives",)),
    (pages.DOCS / "results/two-hosts.md", "two_hosts", two_hosts.page, ("two_hosts",)),
    (pages.DOCS / "results/ddp.md", "slow_link", slow_link.page, ("slow_link",)),
    (pages.DOCS / "results/ddp.md", "auto_runs", auto_runs.page, ("auto_runs",)),
    (pages.DOCS / "results/fsdp.md", "fsdp_speed", fsdp_speed.page, ("fsdp_speed",)),
    (pages.DOCS / "results/tensor-parallel.md", "tp_speed", tp_speed.page, ("tp_speed",)),
    (pages.DOCS / "results/codecs.md", "quality", quality.page, ("quality",)),
    (pages.DOCS / "results/partial-sums.md", "partial_sums", partial_sums.page, ("partial_sums",)),
    (pages.DOCS / "results/partial-sums.md", "two_shot_error", two_shot_error.page, ("two_shot_error",)),
    (pages.DOCS / "guides/planning.md", "published_runs", published_runs.page, ("published_runs",)),
    (
        pages.DOCS / "guides/planning.md",
        "compression_setups",
        compression_setups.page,
        ("compression_setups",),
    ),
]

# A campaign of half an hour, whose table is there once it has run.
if (RESULTS / "elastic.json").exists():
    PAGES.append((pages.DOCS / "guides/across-sites.md", "elastic", elastic_page.page, ("elastic",)))


def kept(program: str) -> dict[str, Any]:
    """Return the result of a program in ``bench/results``."""
    result: dict[str, Any] = json.loads((RESULTS / f"{program}.json").read_text(encoding="utf-8"))
    return result


def between_marks(text: Callable[..., str], programs: tuple[str, ...]) -> str:
    """Return the text between two marks: the table, and for each program of how many runs it shows the median."""
    results = [kept(program) for program in programs]
    return "\n\n".join([text(*results), *map(pages.provenance, results)])


def main() -> None:
    """Write all tables."""
    for page, marks, text, programs in PAGES:
        print(pages.fill(page, marks, between_marks(text, programs)))


if __name__ == "__main__":
    main()
