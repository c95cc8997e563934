"""bench.workload_links measures steps over a real link of two network namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import workload_links
from dtcomm.measure import netns

WHY = netns.why_unavailable()


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY or "-")
def test_a_short_run_measures_every_contestant(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    result = workload_links.main(
        [
            "--gbit",
            "1",
            "--workloads",
            "recommendation",
            "--methods",
            "torch's bf16 hook",
            "int8",
            "PowerSGD rank 4",
        ]
        + ["--repetitions", "2", "--json", str(path)]
    )
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["compute", "none", "torch's bf16 hook", "int8", "PowerSGD rank 4", "auto"]
    assert all(row["ms"] > 0 and row["gbit"] == 1 for row in rows.values())
    assert rows["none"]["faster"] == 1 and rows["auto"]["chosen"]
    assert path.exists()
