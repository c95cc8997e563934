"""bench.gpu_fused and bench.gpu_kernels: verdicts, the time budget, result files, and the error without a device."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bench import fused_launch, gpu_fused, gpu_kernels
from bench.common.budget import Budget
from dtcomm import _emulator


def test_verdict_covers_every_target() -> None:
    rows = [{"codec": name, "of_floor": 0.9} for name in (*gpu_fused.TARGETS, "none")]
    assert gpu_fused.verdict(rows) == "met"
    rows[1]["of_floor"] = 0.84
    assert gpu_fused.verdict(rows) == "MISSED"
    assert gpu_fused.verdict(rows[2:]) == "not measured: int8, fp8_e4m3"
    rows[3]["of_floor"] = 0.1  # codec none has no target
    rows[1]["of_floor"] = 0.85
    assert gpu_fused.verdict(rows) == "met"


def test_measurements_beyond_the_time_budget_are_cut_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([100.0, 104.0, 104.0, 104.0, 111.0, 111.0, 111.0]).__next__
    budget = Budget(10, now)
    assert budget.allows("the first")
    assert not budget.allows("a long one", seconds=8)
    assert not budget.allows("the last")
    assert budget.left() == 0 and budget.cuts == ["a long one", "the last"]
    messages = capsys.readouterr().err.splitlines()
    assert messages == [
        "CUT: a long one: 6 of 10 seconds are left, and this may take 8 s; more with --seconds N",
        "CUT: the last: 0 of 10 seconds are left; more with --seconds N",
    ]
    assert gpu_fused.between_processes(Budget(0)) == {"not run": "cut"}


@pytest.fixture
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in (gpu_fused, gpu_kernels):
        monkeypatch.setattr(program, "Budget", lambda seconds: Budget(seconds, now=lambda: 0.0))


@pytest.mark.usefixtures("frozen_clock")
def test_fused_kernel_benchmark_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measure in the emulator; the time budget does not allow the run with two processes."""
    file = tmp_path / "folder" / "fused.json"
    line = "--device emulator --ranks 2 --mib 0.004 --codecs none int8 --sizes 64 256 --published 2048 --seconds 25"
    assert gpu_fused.main(f"{line} --json {file}".split()) == 0
    report = json.loads(file.read_text())
    assert [(row["codec"], row["of_floor"] > 0) for row in report["bandwidth"]] == [
        ("int8", True),
        ("none", True),
    ]
    assert [(row["codec"], row["size"]) for row in report["latency"]] == [
        (spec, size) for spec in ("none", "int8") for size in (64, 256)
    ]
    assert all(row["replayed_microseconds"] > 0 for row in report["latency"])
    assert [(row["codec"], row["dtype"]) for row in report["published"]] == [
        ("fp8_e4m3", "bfloat16"),
        ("none", "bfloat16"),
    ]
    assert all(
        "torch multimem (flashinfer#3759) 8.5 us on 8 H200" in row["published"] for row in report["published"]
    )
    assert report["cut"] == ["two processes on one device"] and report["processes"] == {"not run": "cut"}
    assert report["verdict"] == "not measured: fp8_e4m3, int4" and report["versions"]["torch"]
    output = capsys.readouterr()
    assert "CUT: two processes on one device" in output.err and "of the floor" in output.out


@pytest.mark.usefixtures("frozen_clock")
def test_codec_kernel_benchmark_writes_its_results(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    assert gpu_kernels.main(f"--device cpu --mib 0.01 --codecs int8 --json {file}".split()) == 0
    report = json.loads(file.read_text())
    verbs = ["encode", "decode", "reduce", "reduce_encode", "encode"]
    assert [row["verb"].split()[0] for row in report["rows"][:5]] == verbs
    assert all(row["of_copy"] > 0 for row in report["rows"]) and report["cut"] == []
    assert gpu_kernels.main(f"--device cpu --mib 0.01 --seconds 0 --json {file}".split()) == 0
    report = json.loads(file.read_text())
    assert (
        report["rows"] == [] and len(report["cut"]) == len([*gpu_kernels.FIRST_TIER, *gpu_kernels.OTHERS]) + 1
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("program", [gpu_fused, gpu_kernels])
def test_benchmarks_fail_without_a_cuda_device(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_a_launch_does_not_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's time of launches is measured with one plan for each case."""
    made = []
    plan = _emulator.FusedPlan
    monkeypatch.setattr(_emulator, "FusedPlan", lambda **spec: made.append(spec) or plan(**spec))
    rows = fused_launch.measure(2, calls=20, runs=2)
    assert [(row["algorithm"], row["codec"]) for row in rows] == list(fused_launch.CASES)
    assert all(0 < row["launch_us"] < row["plan_us"] for row in rows)
    assert sum(spec["numel"] == 0 for spec in made) == len(rows)  # 40 launches of each, planned once
