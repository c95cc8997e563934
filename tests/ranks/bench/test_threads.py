"""bench.threads: every number of threads is measured, and its bits are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import threads


@pytest.mark.slow
def test_every_number_of_threads_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "threads.json"
    line = f"--threads 1 3 --sizes 256K --codecs none int8 --repetitions 2 --json {out}"
    assert threads.main(line.split()) == 0
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    measured = {(timing["codec"], timing["threads"]) for timing in row["timings"]}
    names = ("none", threads.EMPTY, "int8")
    assert measured == {(name, count) for name in names for count in (1, 3)}
    assert result["wrong"] == result["cuts"] == []
    assert "all_reduce of 256 KB" in capsys.readouterr().out


@pytest.mark.slow
def test_what_no_longer_fits_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "threads.json"
    assert threads.main(f"--threads 1 --codecs int8 --seconds 0 --json {out}".split()) == 0
    result = json.loads(out.read_text())
    assert result["rows"] == [] and result["cuts"] == ["64 MB"]
