"""torchrun restarts the ranks after one was killed; the new ranks continue, and nothing of the old ones is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress import soak


@pytest.mark.slow
def test_ranks_restarted_by_torchrun_continue(tmp_path: Path) -> None:
    arguments = ["--kills", "1", "--ranks", "2", "--life", "0.5", "1", "--pause", "0"]
    report = soak.main([*arguments, "--json", str(tmp_path / "soak.json")])
    assert report["verdict"] == "PASS", report["complaints"]
    assert report["incarnations"] == 2 and report["operations"] >= 80
    survivors = [run for run in report["runs"] if run["incarnation"] == 0 and run["ended"] == "lost"]
    for survivor in survivors:  # none, if torchrun stopped it before its operation failed
        error = survivor["error"]
        # The soak also compares with Gloo; the loss may occur there, and Gloo's own error names no rank.
        if error["error"] != "RuntimeError":
            assert f"rank {survivor['victim']}" in error["message"]
        else:
            assert "gloo" in error["message"]
    assert {run["ended"] for run in report["runs"] if run["incarnation"] == 1} == {"end"}
