"""bench.uneven_ranks trains with every seed and writes rows that several runs can be merged by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import uneven_ranks
from bench.common import runs


@pytest.mark.slow
def test_two_seeds_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "uneven.json"
    arguments = ["--steps", "4", "--seeds", "2", "--sample-ms", "1", "--json", str(path)]
    result = uneven_ranks.main(arguments)
    written = json.loads(path.read_text())
    runs.check_rows(written)
    assert [row["seed"] for row in written["runs"]] == [0, 1]
    assert written["gain"] == pytest.approx(sum(result["gains"]) / 2, abs=2e-3)
    text = capsys.readouterr().out
    assert "seed 0" in text and "seed 1" in text and f"goal {uneven_ranks.GOAL:g}" in text
    assert all(sum(row["sizes"]) == uneven_ranks.BATCH for row in written["runs"])
