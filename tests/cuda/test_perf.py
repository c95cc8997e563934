"""``dtcomm perf`` and ``dtcomm codecs`` on a device: events, graphs, checks, comparisons; most need one GPU only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.memory_floor import TimedCopy, time_calls
from dtcomm.cli.main import main
from dtcomm.measure import DeviceClock, LaunchClock, make_clock
from tests.cuda.device_cases import NEEDS_GPU

pytestmark = NEEDS_GPU
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
one_device = pytest.mark.skipif(torch.cuda.device_count() != 1, reason="is about one CUDA device")


def perf(tmp_path: Path, line: str, status: int = 0) -> dict[str, Any]:
    file = tmp_path / "report.json"
    assert main(["perf", *line.split(), "-n", "5", "-w", "2", "--json", str(file)]) == status
    document = json.loads(file.read_text())
    assert isinstance(document, dict)
    return document


def test_events_time_the_device_and_graphs_replay() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = make_clock(device)
    assert isinstance(clock, DeviceClock) and isinstance(make_clock(device, cpu=True), LaunchClock)
    x = torch.zeros(1 << 20, device=device)
    replay = clock.graph(lambda: x.add_(1), 5)
    before = x[0].item()
    replay()
    assert x[0].item() == before + 5
    assert 0 < time_calls(clock, replay, 5, queued_before=replay) < 1
    copy = TimedCopy(device, clock, 64 << 20)
    copy.time(3)
    assert copy.bytes_per_second() > 1e9


@one_device
def test_ranks_that_share_a_device_go_over_gloo(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = perf(tmp_path, "all_reduce -b 64K -e 64K --backend dtcomm,gloo --codec none,int8 -c 2")
    assert document["out_of_bounds"]["okay"] and document["config"]["ranks"] == 2
    assert {row["moved_by"] for row in document["results"]} == {"gloo"}
    output = capfd.readouterr().out
    assert "# Device cuda: torch sees a GPU" in output and "share a GPU" in output
    assert main(["perf", "all_reduce", "-b", "1K", "-e", "1K", "--backend", "nccl"]) == 2
    assert "NCCL" in capfd.readouterr().err


@one_device
def test_graph_of_gloo_calls_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main("perf all_reduce -b 1K -e 1K -G 2 --backend dtcomm".split()) == 2
    assert "-G 2: --backend dtcomm: Gloo moves bytes through host memory" in capfd.readouterr().err


@one_device
def test_fused_kernels_of_processes_that_share_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    document = perf(tmp_path, "all_reduce -b 16K -e 16K --backend peer --codec none,int8")
    assert document["out_of_bounds"]["okay"]
    assert {row["moved_by"] for row in document["results"]} == {"fused"}


@two_devices
@pytest.mark.parametrize("graph", ["", "-G 3"], ids=["calls", "replays"])
def test_perf_compares_with_nccl(tmp_path: Path, graph: str) -> None:
    line = f"all_reduce -b 64K -e 1M -f 16 --nproc 2 --compare nccl {graph}"
    document = perf(tmp_path, f"{line} --backend dtcomm,process_group --codec none,int8 -c 2")
    assert document["out_of_bounds"]["okay"]
    moved = {row["backend"]: row["moved_by"] for row in document["results"]}
    assert moved["process_group"] == "nccl" == moved["nccl"]


@two_devices
@pytest.mark.parametrize(
    "collective", ["sendrecv", "all_gather", "broadcast", "gather", "scatter", "all_to_all"]
)
def test_every_collective_over_nccl(tmp_path: Path, collective: str) -> None:
    document = perf(tmp_path, f"{collective} -b 64K -e 64K --nproc 2 --backend dtcomm,nccl --codec none,int8")
    assert document["out_of_bounds"]["okay"]
