"""A short campaign that kills and starts ranks of `dtcomm.extensions.elastic`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extensions.stress import elastic


@pytest.mark.slow
def test_ranks_are_killed_and_others_join(tmp_path: Path) -> None:
    arguments = ["--minutes", "0.4", "--pause", "1", "2"]
    report = elastic.main([*arguments, "--json", str(tmp_path / "elastic.json")])
    assert report["verdict"] == "PASS", report["complaints"]
    assert report["processes"] > 3 and report["views"] > 2
    assert set(report["resources"]) == {"start", "end"} and report["resources"]["end"]["descriptors"] > 0
