"""``dtcomm perf`` on simulated GPUs: CPU tensors with a recording clock, and fake CUDA tensors."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from dtcomm.cli.perf import args as perf_args
from dtcomm.cli.perf import output, placement, runner
from dtcomm.cli.perf.backend import TransportUsed
from dtcomm.cli.perf.runner import PerfReport, ProgressListener
from dtcomm.launch.ranks import run_ranks
from tests.support.fake_cuda_ranks import fake_cuda_rank
from tests.support.fake_cuda_tensor import DEVICE
from tests.support.recording_clock import SHARED, FakeGpu, RecordingClock
from tests.support.stream_checker import RecordedStreams

SMALL = "-b 4K -e 4K -n 3 -w 1"


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    """Make torch report four GPUs."""
    monkeypatch.setattr(placement, "cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def parse(line: str) -> perf_args.PerfOptions:
    return perf_args.parse(line.split())


def run_on_fake_gpu(
    rank: int, world_size: int, options: perf_args.PerfOptions
) -> tuple[PerfReport, list[list[str]]]:
    place = FakeGpu()
    report = runner.run(options, ProgressListener(), place)
    return report, [clock.events for clock in place.clocks]


def test_run_on_a_fake_gpu_is_reported() -> None:
    options = parse(f"all_reduce {SMALL} --nproc 2 --backend dtcomm,gloo --codec none,int8 -m 2 -c 2")
    report, clock_events = run_ranks(run_on_fake_gpu, 2, options)[0]
    assert report.wrong == 0 and [row.transport.name for row in report.rows] == ["native", "native", "gloo"]
    # This clock does not count calls, so all times are 0; only its marks are checked.
    for events in clock_events:
        assert (
            events.count("synchronize") == 4 and events.count("record") == 2 * 4
        )  # out of place, then in place
    shown = "\n".join([*output.format_header(report), *output.format_footer(report)])
    assert "# WARNING: ranks 0 and 1 share a GPU: NCCL is unavailable" in shown
    assert "# Device cuda: torch sees a GPU; --device cpu measures CPU tensors" in shown
    assert "device cuda:0 no GPU" in shown
    document = output.as_dict(report, ["all_reduce"])
    assert [gpu["name"] for gpu in document["config"]["gpus"]] == ["no GPU"]
    assert document["config"]["device"] == "cuda" and document["results"][2]["moved_by"] == "gloo"
    heads = next(line for line in output.format_header(report) if line.startswith("#       size"))
    lines = [output.format_row(options, row, 2) for row in report.rows]
    end = heads.index("moved") + len("moved")
    assert [line[:end].split()[-1] for line in lines] == ["native", "native", "gloo"]


def test_graphs_are_replayed_with_fresh_inputs_and_refused_over_gloo() -> None:
    options = parse(f"all_reduce {SMALL} --nproc 2 -d half -n 40 -G 3 --backend dtcomm")
    report, clock_events = run_ranks(run_on_fake_gpu, 2, options)[0]
    assert report.wrong == 0
    (events,) = clock_events
    assert [event for event in events if event.startswith("graph")] == ["graph of 40", "graph of 12"]
    assert all(
        len(place.timing.iterations) == 3 for place in (report.rows[0].in_place, report.rows[0].out_of_place)
    )
    options = parse(f"all_reduce {SMALL} --nproc 2 -G 3 --backend gloo")
    with pytest.raises(ValueError, match="-G 3: --backend gloo: Gloo moves bytes through host memory"):
        run_ranks(run_on_fake_gpu, 2, options)


class FaultCountingClock(RecordingClock):
    """A clock that also records the number of faults at each mark."""

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self._streams = streams
        self.faults: list[tuple[int, int]] = []

    def record(self) -> int:
        at = super().record()
        self.faults.append((at, len(self._streams.faults)))
        return at


def run_on_fake_cuda_tensors(
    rank: int, world_size: int, options: perf_args.PerfOptions
) -> tuple[PerfReport, list[str]]:
    """Return the report and the faults between two marks of a batch; checks and refills may wait for the device."""
    streams, clocks = RecordedStreams(), []

    class FakeCudaTensor(FakeGpu):
        device = DEVICE

        def clock(self, cpu: bool) -> FaultCountingClock:
            clocks.append(FaultCountingClock(streams))
            return clocks[-1]

    with fake_cuda_rank(streams):
        report = runner.run(options, ProgressListener(), FakeCudaTensor())
    timed_faults = []
    for clock in clocks:
        for (begin, before), (end, after) in itertools.pairwise(clock.faults):
            if "synchronize" not in clock.events[begin:end]:
                timed_faults += streams.faults[before:after]
    assert clocks and all(clock.faults for clock in clocks)
    return report, timed_faults


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_timed_calls_do_not_wait_for_the_device(collective: str) -> None:
    """Run dtcomm's streams over a stand-in for NCCL, with tensors that record when the host waits for them."""
    line = f"{collective} {SMALL} --nproc 2 --backend process_group --codec none,int8"
    report, timed_faults = run_ranks(run_on_fake_cuda_tensors, 2, parse(line), fresh=True)[0]
    assert report.wrong == 0 and timed_faults == []
    assert [row.transport for row in report.rows] == [TransportUsed("threads")] * 2  # the stand-in for NCCL


def test_wait_in_a_timed_call_is_detected() -> None:
    options = parse(f"all_reduce {SMALL} --nproc 2 --backend tests.ranks.cli.backends:CopiesToHost")
    _, timed_faults = run_ranks(run_on_fake_cuda_tensors, 2, options, fresh=True)[0]
    assert timed_faults and set(timed_faults) == {"the host waits for the device in item"}


def place_on_simulated_gpus(
    rank: int, world_size: int, ids: list[str]
) -> tuple[str, str, int, list[str], str]:
    """Return the placement of a rank in whose process torch reports one GPU."""
    properties = SimpleNamespace(uuid=ids[rank], name="no GPU", major=9, minor=0, multi_processor_count=2)
    properties.total_memory = 1 << 30
    for name, stand_in in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: properties,
        "get_device_name": lambda device: properties.name,
        "mem_get_info": lambda device: (600, 1000),
    }.items():
        assert hasattr(torch.cuda, name)
        setattr(torch.cuda, name, stand_in)
    place = placement.place_rank("cuda")
    facts = [gpu["uuid"] for gpu in placement.gather_gpus(place)]
    return str(place.device), place.shared_gpu, place.free_bytes(), facts, place.pin(None)


def test_ranks_detect_a_shared_gpu() -> None:
    for facts in run_ranks(place_on_simulated_gpus, 2, ["1", "2"], fresh=True):
        assert facts == ("cuda:0", "", 600, ["1", "2"], "cuda:0 no GPU")
    for facts in run_ranks(place_on_simulated_gpus, 2, ["1", "1"], fresh=True):
        assert facts == ("cuda:0", SHARED, 300, ["1"], "cuda:0 no GPU")
