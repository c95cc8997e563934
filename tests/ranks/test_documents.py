"""The Python code in README.md and docs/ runs.

The blocks of a page run in order, in one namespace, on two ranks started as torchrun would. Three comments in a page
change that:

- ``<!-- setup`` ... ``-->`` holds code that runs without being shown, such as a small model;
- ``<!-- not run: REASON -->`` before a block leaves it out;
- ``<!-- ranks: N -->`` anywhere runs the page on N ranks.
"""

from __future__ import annotations

import os
import re
import socket
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from dtcomm.launch.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\n+)?^(?P<fence>`{3,})(?P<language>python|diff)\n(?P<code>.*?)^(?P=fence)$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the blocks of a page that run, as (number of the first line, code)."""
    code_blocks = []
    for match in BLOCK.finditer(text):
        if match["skip"]:
            continue
        code = match["setup"] or match["code"]
        if match["language"] == "diff":  # what the file is after the change
            lines = [line for line in code.splitlines() if not line.startswith("-")]
            code = "\n".join(line[1:] for line in lines) + "\n"
        start = match.start("setup") if match["setup"] else match.start("code")
        code_blocks.append((text.count("\n", 0, start) + 1, textwrap.dedent(code)))
    return code_blocks


def ranks_of(text: str) -> int:
    """Return the number of ranks that a page runs on."""
    match = re.search(r"<!-- ranks: (\d+) -->", text)
    return int(match[1]) if match else 2


def run_page(rank: int, world_size: int, page: str, port: int, folder: str) -> None:
    """Run a page's blocks on this rank."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.chdir(folder)  # pages may write files
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for line, code in blocks(Path(page).read_text(encoding="utf-8")):
            exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# The other pages take a minute together.
QUICK = (ROOT / "README.md", ROOT / "docs/quickstart.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in QUICK else pytest.mark.slow, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if blocks(page.read_text(encoding="utf-8"))
    ],
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world_size = ranks_of(page.read_text(encoding="utf-8"))
    run_ranks(run_page, world_size, str(page), port, str(tmp_path), backend=None, fresh=True, timeout=120)


def test_blocks_are_extracted() -> None:
    text = "\n".join(
        [
            "<!-- setup",
            "x = 1",
            "-->",
            "```python",
            "y = x",
            "```",
            "<!-- not run: needs a GPU -->",
            "```python",
        ]
        + ["broken(", "```", "```diff", " a = 1", "-b = 2", "+b = 3", "```"]
    )
    assert blocks(text) == [(2, "x = 1\n"), (5, "y = x\n"), (12, "a = 1\nb = 3\n")]
