"""bench.common.gpu_page keeps the medians of runs from a GPU, and the shares of the commit before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.common import gpu_page, output


def run(folder: Path, name: str, share: float, gpu: str = "NVIDIA H100 80GB HBM3") -> Path:
    """Write a run of bench.gpu_kernels; return its path."""
    rows = [
        {
            "codec": codec,
            "verb": verb,
            "mib": mib,
            "bytes": int(mib) << 20,
            "of_copy": share,
            "spread": [0, 1],
        }
        for codec in (*gpu_page.SHOWN_TIER, "sign")
        for verb in gpu_page.VERBS
        for mib in (64.0, 1024.0)
    ]
    versions = {"torch": "2.11.0", "cuda": "13.0", "python": "3.12.3", "cores": 16}
    result: dict[str, Any] = {
        "device": {"name": gpu, "driver": "580"},
        "versions": versions,
        "rows": rows,
        "cut": [],
    }
    path = folder / name
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(output, "RESULTS", tmp_path / "results")
    return tmp_path / "results" / "gpu_kernels.json"


def test_runs_of_another_commit_replace_a_result_and_keep_its_shares(tmp_path: Path, results: Path) -> None:
    gpu_page.keep("gpu_kernels", [run(tmp_path, "first", 0.25)], "aaaa", "2026-01-01")
    assert "before" not in json.loads(results.read_text(encoding="utf-8"))
    paths = [run(tmp_path, str(share), share) for share in (0.7, 0.9, 0.8)]
    for _ in range(2):  # kept again, the commit before stays the same
        gpu_page.keep("gpu_kernels", paths, "bbbb", "2026-01-02")
        kept = json.loads(results.read_text(encoding="utf-8"))
        assert {row["of_copy"] for row in kept["rows"]} == {0.8}
        assert kept["rows"][0]["of_copy_range"] == [0.7, 0.9]
        assert "spread" not in kept["rows"][0]
        assert [entry["commit"] for entry in kept["measurements"]] == ["bbbb"] * 3
        assert (kept["before"]["commit"], kept["before"]["runs"]) == ("aaaa", 1)
        text = gpu_page.kernels(kept)
        assert "| `int8` | 0.80 [0.70–0.90] |" in text and "| `sign` | 0.80" in text
        assert "| `int8` | 0.25 → 0.80 |" in text


def test_shares_of_another_gpu_are_named(tmp_path: Path, results: Path) -> None:
    gpu_page.keep("gpu_kernels", [run(tmp_path, "first", 0.25)], "aaaa", "2026-01-01")
    gpu_page.keep("gpu_kernels", [run(tmp_path, "second", 0.5, gpu="NVIDIA H200")], "bbbb", "2026-01-02")
    text = gpu_page.kernels(json.loads(results.read_text(encoding="utf-8")))
    assert "before (commit aaaa, one run, on NVIDIA H100 80GB HBM3) and now" in text


def test_runs_of_different_machines_are_refused(tmp_path: Path, results: Path) -> None:
    paths = [run(tmp_path, "one", 0.5), run(tmp_path, "two", 0.5, gpu="NVIDIA H200")]
    with pytest.raises(ValueError, match=r"different machines.*H200"):
        gpu_page.keep("gpu_kernels", paths, "aaaa", "2026-01-01")
    assert not results.exists()
