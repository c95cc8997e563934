"""``dtcomm perf --device``: what is chosen, refused and told; and its way on a GPU that is not there."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtcomm.cli import perf_backends, perf_json, perf_options, perf_place, perf_run, perf_table
from dtcomm.cli.perf_backend import Moved
from dtcomm.cli.perf_ours import moved
from dtcomm.cli.perf_report import Listener, Report
from dtcomm.cli.perf_torch import OVERLAPPING, why_no_nccl, why_no_symmetric
from dtcomm.testing.dressed import DEVICE
from dtcomm.testing.dressed_ranks import devices
from dtcomm.testing.ranks import run_ranks
from dtcomm.testing.streams import RecordedStreams
from tests.cli.clocks import SHARED, Counted, FakeGpu

SMALL = "-b 4K -e 4K -n 3 -w 1"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees four."""
    monkeypatch.setattr(perf_place, "found", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def parse(line: str) -> perf_options.Options:
    return perf_options.parse(line.split())


@pytest.mark.usefixtures("gpus")
def test_where_torch_sees_gpus_these_are_measured_unless_something_else_is_named() -> None:
    chosen = parse("all_reduce")
    assert (chosen.device, chosen.nproc, chosen.backends) == ("cuda", 4, ["dtcomm"])
    assert "torch sees a GPU" in chosen.device_why
    assert parse("all_reduce --device cpu").backends == ["native"]
    for line in ("--backend native", "--backend gloo,native", "--compare mpi"):
        try:
            named = parse(f"all_reduce {line}")
        except SystemExit:  # Open MPI may not be here
            continue
        assert named.device == "cpu" and "CPU tensors alone" in named.device_why
    assert parse("all_reduce --nproc 2 --device cuda").nproc == 2
    peers = parse("all_reduce --compare nccl,symm_two_shot,symm_one_shot -d bfloat16")
    assert peers.backends == ["dtcomm", "nccl", "symm_two_shot", "symm_one_shot"]
    assert parse("all_reduce --virtual 8").nproc == 4 and parse("all_reduce --virtual 8").virtual == 8


def test_without_a_gpu_the_cpu_is_measured() -> None:
    chosen = parse("all_reduce")
    assert (chosen.device, chosen.device_why, chosen.nproc) == ("cpu", "", 2)
    assert not chosen.on_device and parse("all_reduce --virtual 2 --device emulator").on_device


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(line)
    assert caught.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--device cuda", "--device cuda: torch sees no CUDA device; valid here: cpu, and emulator"),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
        ("--device emulator", "--device emulator: is for --virtual N; without it, valid: cpu, cuda"),
        ("--backend nccl", "--backend nccl: has no cpu tensors; on that device: dtcomm, native, "),
        ("--compare nccl", "--compare nccl: has no cpu tensors; on that device: gloo"),
        ("-G 3", "-G 3: CUDA graphs need --device cuda or --virtual N, not cpu"),
        ("--virtual 2", "--virtual 2: torch sees no CUDA device; --device emulator runs"),
        ("--virtual 9 --device emulator", "--virtual 9: expected 2 to 8 ranks"),
        ("--virtual 2 --device cpu", "--device cpu: virtual ranks run on cuda, or "),
        ("--virtual 2 --device emulator --backend gloo", "--backend: with --virtual one process"),
        ("--virtual 2 --device emulator --nproc 2", "--nproc: with --virtual one process"),
        ("--virtual 2 --device emulator -m 2", "--virtual: is measured without -m and -z"),
        (
            "--virtual 2 --device emulator --codec topk:ratio=0.1",
            "--virtual: codec topk:ratio=0.1 of float32",
        ),
        ("--virtual 2 --device emulator -d int32", "--virtual: codec none of int32 has no fused kernel"),
    ],
)
def test_what_does_not_go_together_is_told(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in refused(f"all_reduce {line}", capsys)


@pytest.mark.usefixtures("gpus")
def test_what_gpus_cannot_do_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--backend native: has no cuda tensors" in refused(
        "all_reduce --device cuda --backend native", capsys
    )
    assert "-z 1: the calls of a graph (-G 5)" in refused("all_reduce -G 5 -z 1", capsys)
    assert "not broadcast" in refused("broadcast --backend symm_two_shot", capsys)
    assert "-d half: symm_one_shot takes float, bfloat16" in refused(
        "all_reduce -d half --backend symm_one_shot", capsys
    )
    assert "sendrecv has no fused kernel" in refused("sendrecv --virtual 2", capsys)
    assert "--virtual" in refused("all_reduce --virtual 2 --compare nccl", capsys)


def test_why_peers_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert why_no_nccl("") == ""
    assert why_no_nccl(SHARED).startswith("ranks 0 and 1 share a GPU, and NCCL wants one for each rank")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "was built without NCCL" in why_no_nccl("")
    monkeypatch.delenv(OVERLAPPING, raising=False)
    assert why_no_symmetric(2, 1, "") == ""
    assert "one rank has no peer" in why_no_symmetric(1, 1, "")
    assert "2 hosts" in why_no_symmetric(4, 2, "")
    assert f"only with {OVERLAPPING}=1" in why_no_symmetric(2, 1, SHARED)
    monkeypatch.setenv(OVERLAPPING, "1")
    assert why_no_symmetric(2, 1, SHARED) == ""
    assert perf_place.shared(["a 1", "a 2", "b 1"]) == ""
    assert perf_place.shared(["a 1", "a 2", "b 1", "a 2"]) == "ranks 1 and 3 share a GPU"


def info(runtime: str, operations: int, transport: str, **more: object) -> dict[str, object]:
    return {"runtime": runtime, "operations": operations, "transport": transport, **more}


@pytest.mark.parametrize(
    ("before", "after", "by"),
    [
        (info("native", 1, "shared memory"), info("native", 2, "shared memory"), Moved("native")),
        (
            info("process_group", 0, ""),
            info("process_group", 1, "nccl, queued on streams of cuda:0"),
            Moved("nccl"),
        ),
        (info("process_group", 0, ""), info("process_group", 1, "messages of the"), Moved("gloo")),
        (
            info("peer", 3, "", elsewhere={"ring has none": 1}),
            info("peer", 4, "", elsewhere={"ring has none": 1}),
            Moved("fused"),
        ),
        (
            info("peer", 3, "", elsewhere={"ring has none": 1}),
            info("peer", 4, "", elsewhere={"ring has none": 2})
            | {"elsewhere transport": "nccl, queued on streams of cuda:1"},
            Moved("nccl", "ring has none"),
        ),
        ({"runtime": "none"}, {"runtime": "none", "why": "one rank"}, Moved("none", "one rank")),
    ],
)
def test_what_moved_the_bytes_is_read_off_two_reports(
    before: dict[str, object], after: dict[str, object], by: Moved
) -> None:
    assert moved(before, after) == by


def on_a_fake(rank: int, world_size: int, options: perf_options.Options) -> tuple[Report, list[list[str]]]:
    place = FakeGpu()
    report = perf_run.run(options, Listener(), place)
    return report, [clock.story for clock in place.clocks]


@pytest.mark.usefixtures("gpus")
def test_the_whole_way_on_a_gpu_that_is_not_there() -> None:
    options = parse(f"all_reduce {SMALL} --nproc 2 --backend dtcomm,gloo --codec none,int8 -m 2 -c 2")
    report, stories = run_ranks(on_a_fake, 2, options)[0]
    assert report.wrong == 0 and [row.moved.by for row in report.rows] == ["native", "native", "gloo"]
    # A call is nothing that this clock counts, so all times are 0; the marks are what matters here.
    for told in stories:
        assert told.count("settle") == 4 and told.count("mark") == 2 * 4  # out of place, then in place
    shown = "\n".join([*perf_table.header(report), *perf_table.footer(report)])
    assert "# WARNING: ranks 0 and 1 share a GPU: bytes go through the host's memory" in shown
    assert "# Device cuda: torch sees a GPU; --device cpu measures CPU tensors" in shown
    assert "device cuda:0 no GPU" in shown
    document = json.loads(perf_json.to_json(report, ["all_reduce"]))
    assert [gpu["name"] for gpu in document["config"]["gpus"]] == ["no GPU"]
    assert document["config"]["device"] == "cuda" and document["results"][2]["moved_by"] == "gloo"
    heads = next(line for line in perf_table.header(report) if line.startswith("#       size"))
    lines = [perf_table.row(options, row, 2) for row in report.rows]
    end = heads.index("moved") + len("moved")
    assert [line[:end].split()[-1] for line in lines] == ["native", "native", "gloo"]


@pytest.mark.usefixtures("gpus")
def test_graphs_are_replayed_with_fresh_inputs_and_refused_through_the_host() -> None:
    options = parse(f"all_reduce {SMALL} --nproc 2 -d half -n 40 -G 3 --backend dtcomm")
    report, stories = run_ranks(on_a_fake, 2, options)[0]
    assert report.wrong == 0
    (told,) = stories
    assert [what for what in told if what.startswith("graph")] == ["graph of 40", "graph of 12"]
    assert all(
        len(each.timing.iterations) == 3 for each in (report.rows[0].in_place, report.rows[0].out_of_place)
    )
    options = parse(f"all_reduce {SMALL} --nproc 2 -G 3 --backend gloo")
    with pytest.raises(ValueError, match="-G 3: --backend gloo: Gloo moves bytes through the host's memory"):
        run_ranks(on_a_fake, 2, options)


class Watching(Counted):
    """Also keeps how many faults there were at each mark."""

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self._streams = streams
        self.faults: list[tuple[int, int]] = []

    def mark(self) -> int:
        at = super().mark()
        self.faults.append((at, len(self._streams.faults)))
        return at


def on_tensors_that_pass_for_a_device_s(
    rank: int, world_size: int, options: perf_options.Options
) -> tuple[Report, list[str]]:
    """The report, and what was wrong between two marks of a batch; checks and refills may wait for the device."""
    streams, clocks = RecordedStreams(), []

    class Dressed(FakeGpu):
        device = DEVICE

        def clock(self, cpu: bool) -> Watching:
            clocks.append(Watching(streams))
            return clocks[-1]

    with devices(streams):
        report = perf_run.run(options, Listener(), Dressed())
    wrong = []
    for clock in clocks:
        for (begin, before), (end, after) in itertools.pairwise(clock.faults):
            if "settle" not in clock.story[begin:end]:
                wrong += streams.faults[before:after]
    assert clocks and all(clock.faults for clock in clocks)
    return report, wrong


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_nothing_that_is_timed_waits_for_the_device(collective: str) -> None:
    """dtcomm's streams over NCCL, by tensors that say when the host waits for them."""
    line = f"{collective} {SMALL} --nproc 2 --backend process_group --codec none,int8"
    report, wrong = run_ranks(on_tensors_that_pass_for_a_device_s, 2, parse(line), fresh=True)[0]
    assert report.wrong == 0 and wrong == []
    assert [row.moved for row in report.rows] == [Moved("threads")] * 2  # what stands in for NCCL


@pytest.mark.usefixtures("gpus")
def test_what_is_timed_and_does_wait_is_noticed() -> None:
    options = parse(f"all_reduce {SMALL} --nproc 2 --backend tests.cli.backends:Looks")
    _, wrong = run_ranks(on_tensors_that_pass_for_a_device_s, 2, options, fresh=True)[0]
    assert wrong and set(wrong) == {"the host waits for the device in item"}


def with_symmetric_memory(rank: int, world_size: int, options: perf_options.Options) -> Report:
    """torch's operators over symmetric memory, as their schemas have them, made of Gloo on CPU tensors."""
    import torch.distributed._symmetric_memory as memory

    def one_shot(given: torch.Tensor, op: str, group: str, out: torch.Tensor) -> torch.Tensor:
        assert given.data_ptr() != out.data_ptr() and op == "sum"
        out.copy_(given)
        dist.all_reduce(out)
        return out

    def two_shot(given: torch.Tensor, op: str, group: str) -> torch.Tensor:
        assert op == "sum"
        dist.all_reduce(given)
        return given

    here = torch.library.Library("symm_mem", "IMPL")
    here.impl("one_shot_all_reduce_out", one_shot, "CPU")
    here.impl("two_shot_all_reduce_", two_shot, "CPU")
    memory.empty = torch.empty  # type: ignore[assignment]
    memory.rendezvous = lambda made, group: group  # type: ignore[assignment]
    return perf_run.run(options, Listener(), FakeGpu())


@pytest.mark.usefixtures("gpus")
def test_torch_s_all_reduces_over_symmetric_memory() -> None:
    options = parse(f"all_reduce {SMALL} --nproc 2 -O 0 -c 2 --backend symm_one_shot,symm_two_shot")
    report = run_ranks(with_symmetric_memory, 2, options, fresh=True, env={OVERLAPPING: "1"})[0]
    one, two = report.rows
    assert report.wrong == 0 and {row.moved.by for row in report.rows} == {"symm_mem"}
    assert one.in_place is None and one.out_of_place is not None  # peers read the input: not in place
    assert two.in_place is not None and two.out_of_place is None
    with pytest.raises(ValueError, match="--backend symm_one_shot: ranks 0 and 1 share a GPU"):
        run_ranks(with_symmetric_memory, 2, options, fresh=True, env={OVERLAPPING: None})


def on_two_gpus(rank: int, world_size: int, ids: list[str]) -> tuple[str, str, int, list[str], str]:
    """Where a rank finds itself by what torch says, which sees one GPU in each process."""
    said = SimpleNamespace(uuid=ids[rank], name="no GPU", major=9, minor=0, multi_processor_count=2)
    said.total_memory = 1 << 30
    for name, stand_in in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: said,
        "get_device_name": lambda device: said.name,
        "mem_get_info": lambda device: (600, 1000),
    }.items():
        assert hasattr(torch.cuda, name)
        setattr(torch.cuda, name, stand_in)
    place = perf_place.take("cuda")
    facts = [gpu["uuid"] for gpu in perf_place.gpus(place)]
    return str(place.device), place.shared, place.free(), facts, place.pin(None)


def test_ranks_know_whether_they_share_a_gpu() -> None:
    for said in run_ranks(on_two_gpus, 2, ["1", "2"], fresh=True):
        assert said == ("cuda:0", "", 600, ["1", "2"], "cuda:0 no GPU")
    for said in run_ranks(on_two_gpus, 2, ["1", "1"], fresh=True):
        assert said == ("cuda:0", SHARED, 300, ["1"], "cuda:0 no GPU")


def test_every_backend_says_where_its_tensors_are() -> None:
    for name, each in perf_backends.BACKENDS.items():
        assert each.devices and set(each.devices) <= {"cpu", "cuda"}, name
    assert set(perf_backends.PEERS) - {"mpi"} <= set(perf_backends.BACKENDS)
