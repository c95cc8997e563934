"""``dtcomm perf --device``: choices, refusals and messages, also with simulated GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dtcomm.cli.perf import args, libraries, placement
from dtcomm.cli.perf.backend import TransportUsed
from dtcomm.cli.perf.libraries import transport_between, why_no_nccl
from tests.support.recording_clock import SHARED

SMALL = "-b 4K -e 4K -n 3 -w 1"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see four GPUs."""
    monkeypatch.setattr(placement, "cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def parse(line: str) -> args.PerfOptions:
    return args.parse(line.split())


@pytest.mark.usefixtures("gpus")
def test_gpus_are_measured_by_default_if_torch_sees_them() -> None:
    chosen = parse("all_reduce")
    assert (chosen.device, chosen.nproc, chosen.backends) == ("cuda", 4, ["dtcomm"])
    assert "torch sees a GPU" in chosen.device_reason
    assert parse("all_reduce --device cpu").backends == ["native"]
    for line in ("--backend native", "--backend gloo,native"):
        named = parse(f"all_reduce {line}")
        assert named.device == "cpu" and "CPU tensors only" in named.device_reason
    assert parse("all_reduce --nproc 2 --device cuda").nproc == 2
    assert parse("all_reduce --compare nccl -d bfloat16").backends == ["dtcomm", "nccl"]


def test_the_cpu_is_measured_without_a_gpu() -> None:
    options = parse("all_reduce")
    assert (options.device, options.device_reason, options.nproc) == ("cpu", "", 2)
    assert not options.on_device


def error_of(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(line)
    assert caught.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--device cuda", "--device cuda: torch sees no CUDA device; valid: cpu"),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
        ("--backend nccl", "--backend nccl: has no cpu tensors; valid for cpu: dtcomm, native, "),
        ("--compare nccl", "--compare nccl: has no cpu tensors; valid for cpu: gloo"),
        ("-G 3", "-G 3: CUDA graphs need --device cuda, not cpu"),
    ],
)
def test_invalid_combinations_of_flags_are_refused(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(f"all_reduce {line}", capsys)


@pytest.mark.usefixtures("gpus")
def test_calls_that_gpus_do_not_support_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for line, message in (
        ("--device cuda --backend native", "--backend native: has no cuda tensors"),
        ("-G 5 -z 1", "-z 1: not possible with -G 5"),
    ):
        assert message in error_of(f"all_reduce {line}", capsys)


def test_reasons_why_nccl_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert why_no_nccl("") == ""
    assert why_no_nccl(SHARED).startswith("ranks 0 and 1 share a GPU, but NCCL needs one for each rank")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "was built without NCCL" in why_no_nccl("")
    assert placement.describe_shared_gpu(["a 1", "a 2", "b 1"]) == ""
    assert placement.describe_shared_gpu(["a 1", "a 2", "b 1", "a 2"]) == "ranks 1 and 3 share a GPU"


def report(runtime: str, operations: int, transport: str = "", **more: object) -> dict[str, object]:
    return {"runtime": runtime, "operations": operations, "transport": transport, **more}


NO_GROUP = report("process_group", 0)
PEER = report("peer", 3, elsewhere={"ring has none": 1})


@pytest.mark.parametrize(
    ("before", "after", "transport"),
    [
        (report("native", 1, "shared memory"), report("native", 2, "shared memory"), TransportUsed("native")),
        (NO_GROUP, report("process_group", 1, "nccl, queued on streams of cuda:0"), TransportUsed("nccl")),
        (NO_GROUP, report("process_group", 1, "messages of the"), TransportUsed("gloo")),
        (PEER, PEER | {"operations": 4}, TransportUsed("fused")),
        (
            PEER,
            report("peer", 4, elsewhere={"ring has none": 2})
            | {"elsewhere transport": "nccl, queued on streams of cuda:1"},
            TransportUsed("nccl", "ring has none"),
        ),
        ({"runtime": "none"}, {"runtime": "none", "reason": "one rank"}, TransportUsed("none", "one rank")),
    ],
)
def test_the_transport_follows_from_two_reports(
    before: dict[str, object], after: dict[str, object], transport: TransportUsed
) -> None:
    assert transport_between(before, after) == transport


def test_every_backend_names_the_devices_of_its_tensors() -> None:
    for name, backend in libraries.BACKENDS.items():
        assert backend.devices and set(backend.devices) <= {"cpu", "cuda"}, name
    assert set(libraries.PEERS) <= set(libraries.BACKENDS)
