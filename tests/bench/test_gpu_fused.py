"""What bench.gpu_fused says of its targets, what it cuts, and what it says where there is no device."""

import sys

import pytest
import torch

from bench import gpu_fused, gpu_kernels
from bench.common.budget import Budget


def test_a_verdict_is_about_every_target() -> None:
    rows = [{"codec": name, "of_floor": 0.9} for name in (*gpu_fused.TARGETS, "none")]
    assert gpu_fused.verdict(rows) == "met"
    rows[1]["of_floor"] = 0.84
    assert gpu_fused.verdict(rows) == "MISSED"
    assert gpu_fused.verdict(rows[2:]) == "not measured: int8, fp8_e4m3"
    rows[3]["of_floor"] = 0.1  # none is no target
    rows[1]["of_floor"] = 0.85
    assert gpu_fused.verdict(rows) == "met"


def test_what_no_longer_fits_is_cut_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([100.0, 104.0, 104.0, 104.0, 111.0, 111.0, 111.0]).__next__
    budget = Budget(10, now)
    assert budget.allows("the first")
    assert not budget.allows("a long one", seconds=8)
    assert not budget.allows("the last")
    assert budget.left() == 0 and budget.cuts == ["a long one", "the last"]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "CUT: a long one: 6 of 10 seconds are left, and this may take 8 s; more with --seconds N",
        "CUT: the last: 0 of 10 seconds are left; more with --seconds N",
    ]
    assert gpu_fused.between_processes(Budget(0)) == {"not run": "cut"}


def test_what_runs_on_a_device_runs_in_the_emulator() -> None:
    cpu, rows = torch.device("cpu"), []
    rows = gpu_fused.bandwidth(2, 1000, ["int8"], Budget(60), cpu, copied=1 << 20)
    assert [(row["codec"], row["of_floor"] > 0) for row in rows] == [("int8", True)]
    assert gpu_fused.bandwidth(2, 1000, ["int8"], Budget(0), cpu, copied=1 << 20) == []
    small = gpu_fused.latency(2, (64, 256), ["none"], Budget(60), cpu)
    assert [(row["size"], row["replayed_microseconds"] > 0) for row in small] == [(64, True), (256, True)]
    measured = gpu_kernels.Measured(4096, cpu, copied=1 << 20)
    found = gpu_kernels.measure(measured, ["int8"], Budget(60))
    assert [row["verb"].split()[0] for row in found[:5]] == [
        "encode",
        "decode",
        "reduce",
        "reduce_encode",
        "encode",
    ]
    assert all(row["of_copy"] > 0 for row in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("program", [gpu_fused, gpu_kernels])
def test_without_a_device_it_says_so(
    program: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    assert program.main() == 1
    assert "no CUDA device" in capsys.readouterr().err
