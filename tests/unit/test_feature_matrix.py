"""The table of features: each mark names a test that exists, and the page shows what the data file says.

`python -m tests.unit.test_feature_matrix` writes the table into the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "features.md"
DATA: dict[str, Any] = json.loads((ROOT / "docs" / "reference" / "features.json").read_text(encoding="utf-8"))
MARKS = {"tested": "✓", "emulated": "✓ emulated"}
TABLE = re.compile(r"(?<=<!-- table -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def table(data: dict[str, Any]) -> str:
    """Return the matrix in Markdown, a row for each feature."""
    names = list(data["integrations"])
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for feature in data["features"]:
        cells = [data["integrations"][name].get(feature) for name in names]
        lines.append(f"| {feature} | {' | '.join(MARKS[cell['badge']] if cell else '' for cell in cells)} |")
    return "\n".join(lines)


def faults(data: dict[str, Any]) -> list[str]:
    """Return the marks that no existing test stands behind."""
    found = []
    for name, cells in data["integrations"].items():
        for feature, cell in cells.items():
            path, _, function = cell["test"].partition("::")
            file = ROOT / path
            if feature not in data["features"]:
                found.append(f"{name}: {feature} has no row")
            elif not file.is_file() or f"def {function}(" not in file.read_text(encoding="utf-8"):
                found.append(f"{name}, {feature}: there is no test {cell['test']}")
            elif feature == "NCCL" and cell["badge"] != "emulated":
                found.append(f"{name}, NCCL: it has not run between two GPUs, so it is emulated")
    return found


def test_each_mark_names_a_test_that_exists() -> None:
    assert not faults(DATA)


def test_the_page_shows_the_data() -> None:
    match = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert match and match[0] == table(DATA), "run python -m tests.unit.test_feature_matrix"


def test_faults_are_found() -> None:
    cell = {"badge": "tested", "test": "tests/ranks/ddp/test_hook.py::test_that_does_not_exist"}
    data = {"features": ["CPU"], "integrations": {"DDP": {"CPU": cell, "TPU": cell}}}
    assert [fault.partition(":")[0] for fault in faults(data)] == ["DDP, CPU", "DDP"]


if __name__ == "__main__":
    PAGE.write_text(
        TABLE.sub(lambda _: table(DATA), PAGE.read_text(encoding="utf-8")), encoding="utf-8", newline="\n"
    )
