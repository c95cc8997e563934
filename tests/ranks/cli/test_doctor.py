"""`dtcomm doctor` on this machine, and its findings on simulated faulty machines."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import dtcomm
from dtcomm import env
from dtcomm.cli import doctor as doctor_command
from dtcomm.cli.doctor import checks, network
from dtcomm.errors import DtcommError
from dtcomm.kernels import ops
from dtcomm.launch import ranks
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime import emulated_link
from dtcomm.runtime.native import copy_policy


def _report(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, dict[str, Any]]]:
    status = doctor_command.main(["--json", *argv])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (status == 0)
    return status, {check["name"]: check for check in report["checks"]}


def test_this_machine_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    status, results = _report(capsys)
    assert status == 0
    assert list(results) == ["versions", "build", "kernels", "cuda", "ucx", "cores", "variables", "engine"]
    assert results["kernels"]["current"] == ops.current()
    engine = results["engine"]
    assert engine["runtime"] == "native" and engine["problems"] == []
    assert all(us > 0 for us in engine["median_us"].values())


def test_text_has_a_line_per_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: [_self_test_result(), _self_test_result()])
    assert doctor_command.main([]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert len(lines) == 8 and all(line.split()[0] in ("ok", "note") for line in lines)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"settled": False}, "nothing chosen by trials"),
        ({"single_copy": True}, "chosen in 9 trials: one copy, pieces of 128 KiB"),
        ({"stream_payload": False}, "chosen in 9 trials: two copies with ordinary stores, pieces of 128 KiB"),
        (
            {"stream_payload": True},
            "chosen in 9 trials: two copies with non-temporal stores, pieces of 128 KiB",
        ),
    ],
)
def test_choices_are_described(choice: dict[str, Any], text: str) -> None:
    usual = {"settled": True, "size_class": "1 MiB none sum", "piece_bytes": 128 * 1024, "trials": 9}
    usual |= {"single_copy": False, "stream_payload": False, "parallel": False}
    assert checks.describe_choices([usual | choice]) == text


def _self_test_result(**change: Any) -> dict[str, Any]:
    result = {"problems": [], "digest": "d", "median_us": {"none": 1.0}, "runtime": "native", "reason": "w"}
    return {**result, "choices": [], "threads": 1, "single_copy": "switched off", **change}


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"problems": ["none: the sum is wrong"]}, "FAIL", "rank 1: none: the sum is wrong"),
        ({"digest": "other"}, "FAIL", "different bits"),
        ({}, "ok", "same bits"),
    ],
)
def test_engine_status_follows_the_self_test(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], status: str, text: str
) -> None:
    monkeypatch.setattr(
        ranks, "run_ranks", lambda *_, **__: [_self_test_result(), _self_test_result(**change)]
    )
    check = checks.engine(2)
    assert check.status == status and text in check.summary


def test_engine_notes_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = _self_test_result(runtime="process_group", reason="no shared memory here")
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: [fallback, fallback])
    check = checks.engine(2)
    assert check.status == "note" and "because no shared memory here" in check.summary


def test_self_test_detects_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the self-test with collectives that omit the other rank's contribution or scale the sum."""
    from dtcomm import collectives

    monkeypatch.setattr(collectives, "info", lambda: {"runtime": "native", "reason": ""})
    monkeypatch.setattr(collectives, "all_reduce", lambda x, codec="none": None)
    assert len(checks.self_test(0, 2)["problems"]) == 2
    monkeypatch.setattr(collectives, "all_reduce", lambda x, codec="none": x.mul_(1.5))
    assert len(checks.self_test(0, 1)["problems"]) == 2


def test_wrong_variable_fails_before_ranks_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTCOMM_STAGING", "sideways")
    status, results = _report(capsys)
    assert status == 1 and "engine" not in results
    assert results["variables"]["status"] == "FAIL" and "sideways" in results["variables"]["summary"]


def test_unknown_variable_is_noted_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DTCOMM_KERNELS", "avx2")
    check = checks.variables()
    assert check.status == "note" and check.details["unknown"] == ["DTCOMM_KERNELS"]
    env._warn_of_unknown.cache_clear()
    for _ in range(2):
        env.shared()
    assert caplog.text.count("DTCOMM_KERNELS is not known (did you mean DTCOMM_KERNEL?)") == 1
    monkeypatch.setenv("DTCOMM_FLIGHT_DIR", "/proc/x")
    with pytest.raises(ValueError, match="DTCOMM_FLIGHT_DIR='/proc/x': no folder that can be written"):
        env.shared()


def _reduce_with_peer(rank: int, world_size: int) -> str:
    with pytest.raises((DtcommError, ValueError)) as error:
        dtcomm.all_reduce(torch.ones(4))
    return str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_fused_kernels_without_a_gpu_are_refused() -> None:
    for text in run_ranks(_reduce_with_peer, 2, env={"DTCOMM_RUNTIME": "peer"}):
        assert "DTCOMM_RUNTIME=peer: fused kernels need CUDA tensors" in text


def test_forced_kernel_is_noted() -> None:
    with ops.use("reference"):
        check = checks.kernels()
    assert check.status == "note" and check.details["current"] == "reference"


def test_unused_fused_kernels_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "a GPU", "capability": (9, 0), "memory": 80 << 30}
    info = {"runtime": 13000, "driver": 13000, "error": "", "devices": [gpu]}
    module = SimpleNamespace(platform=lambda: info)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: module)
    monkeypatch.setitem(sys.modules, "dtcomm._cuda", module)
    monkeypatch.setattr(dtcomm, "_cuda", module, raising=False)
    monkeypatch.setattr(checks, "RAN_BETWEEN_GPUS", False)
    expected = "_cuda built with CUDA 13.0, driver for CUDA 13.0; a GPU (sm_90, 80 GiB)"
    assert checks.cuda().summary == f"{expected}; {checks.UNUSED_FUSED_KERNELS}"
    assert "DTCOMM_RUNTIME=peer" in checks.UNUSED_FUSED_KERNELS
    monkeypatch.setattr(checks, "RAN_BETWEEN_GPUS", True)
    assert checks.cuda().summary == expected


def test_more_ranks_than_cores_are_noted() -> None:
    usable = copy_policy.usable_cores()
    assert not checks.cores(usable).details["oversubscribed"]
    assert checks.cores(usable + 1).status == "note"


@pytest.mark.parametrize(
    ("nanoseconds", "text"), [(None, "not measured"), (20, "one core"), (100, "one L3"), (480, "different")]
)
def test_placement_is_described_by_the_round_trip_time(nanoseconds: float | None, text: str) -> None:
    assert text in checks.describe_placement(nanoseconds)


@pytest.mark.parametrize("value", ["0", "65", "two"])
def test_invalid_rank_counts_are_refused(value: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor_command.main(["--nproc", value])


FAST, SLOW = "400mbit,1ms", "100mbit,4ms"


def _measure_links(rank: int, world_size: int, slow_rank: int, expect: str) -> dict[str, Any] | None:
    """Measure the ranks of a job in which one has a slower network card, as DTCOMM_EMULATE_LINK emulates it."""
    if rank == slow_rank:
        link = emulated_link.parse(SLOW)
        with mock.patch("dtcomm.runtime.native.links", lambda: link):
            results = network.measure(expect)
    else:
        results = network.measure(expect)
    return None if results is None else {check.name: check.as_dict() for check in results}


def test_a_slow_rank_of_three_is_named() -> None:
    report, *others = run_ranks(
        _measure_links, 3, 1, "", env={"DTCOMM_EMULATE_LINK": FAST, "DTCOMM_HOST_ID": "h"}
    )
    assert others == [None, None] and report is not None
    assert report["ranks"]["status"] == "ok" and report["ranks"]["hosts"] == ["h"]
    links = report["links"]
    assert links["status"] == "note" and links["failures"] == []
    (line,) = links["slow"]
    assert line.startswith("rank 1 (host h): all 2 links are slow")
    fast = next(link for link in links["links"] if link["ranks"] == (0, 2))
    assert all(0.1 < gbit < 0.4 for gbit in fast["gbit"]) and fast["latency_us"] > 1000


def test_the_link_of_two_ranks_is_compared_with_what_is_expected() -> None:
    report, _ = run_ranks(_measure_links, 2, 1, "300mbit", env={"DTCOMM_EMULATE_LINK": FAST})
    assert report is not None
    (line,) = report["links"]["failures"]
    assert report["links"]["status"] == "FAIL"
    assert line.startswith("ranks 0 and 1: 0.0") and line.endswith("expected 0.3 Gbit/s")
    report, _ = run_ranks(_measure_links, 2, -1, "200mbit", env={"DTCOMM_EMULATE_LINK": FAST})
    assert report is not None and report["links"]["status"] == "ok"
