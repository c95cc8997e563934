"""torchrun starts the ranks anew after one of them was killed, and they go on where nothing of the old ones is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress import soak


@pytest.mark.slow
def test_ranks_restarted_by_torchrun_go_on(tmp_path: Path) -> None:
    arguments = ["--kills", "1", "--ranks", "2", "--life", "0.5", "1", "--pause", "0"]
    found = soak.main([*arguments, "--json", str(tmp_path / "soak.json")])
    assert found["verdict"] == "PASS", found["complaints"]
    assert found["incarnations"] == 2 and found["operations"] >= 80
    survivors = [each for each in found["runs"] if each["incarnation"] == 0 and each["ended"] == "lost"]
    assert len(survivors) == 1
    error = survivors[0]["error"]
    # The soak compares with Gloo in between; the loss may meet it there, and Gloo's own words name no rank.
    if error["error"] != "RuntimeError":
        assert f"rank {survivors[0]['victim']}" in error["message"]
    else:
        assert "gloo" in error["message"]
    assert {each["ended"] for each in found["runs"] if each["incarnation"] == 1} == {"end"}
