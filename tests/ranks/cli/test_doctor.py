"""`dtcomm doctor` on this machine, and on machines with something wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtcomm.cli.doctor import engine, machine
from dtcomm.cli.doctor import main as doctor_command
from dtcomm.kernels import ops
from dtcomm.launch import ranks


def _report(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, dict[str, Any]]]:
    status = doctor_command.main(["--json", *argv])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (status == 0)
    return status, {check["name"]: check for check in report["checks"]}


def test_this_machine_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    status, checks = _report(capsys)
    assert status == 0
    assert list(checks) == ["versions", "build", "kernels", "cuda", "cores", "variables", "engine"]
    assert checks["kernels"]["current"] == ops.current()
    engine = checks["engine"]
    assert engine["runtime"] == "native" and engine["problems"] == []
    assert all(us > 0 for us in engine["median_us"].values())


def test_text_has_a_line_per_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: [_finding(), _finding()])
    assert doctor_command.main([]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert len(lines) == 7 and all(line.split()[0] in ("ok", "note") for line in lines)


def _finding(**change: Any) -> dict[str, Any]:
    found = {"problems": [], "digest": "d", "median_us": {"none": 1.0}, "runtime": "native", "why": "w"}
    return {**found, "round_trip_ns": 100.0, "single_copy": "switched off", **change}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"problems": ["none: the sum is wrong"]}, "FAIL", "rank 1: none: the sum is wrong"),
        ({"digest": "other"}, "FAIL", "different bits"),
        ({}, "ok", "same bits"),
    ],
)
def test_engine_verdicts(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], status: str, words: str
) -> None:
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: [_finding(), _finding(**change)])
    check = engine.engine(2)
    assert check.status == status and words in check.summary


def test_engine_notes_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    fallen = _finding(runtime="process_group", why="no shared memory here", round_trip_ns=0.0)
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: [fallen, fallen])
    check = engine.engine(2)
    assert check.status == "note" and "because no shared memory here" in check.summary


def test_a_wrong_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test itself, with a collective that forgets the other rank, and one that adds too much."""
    from dtcomm import collectives

    monkeypatch.setattr(collectives, "info", lambda: {"runtime": "native", "why": ""})
    monkeypatch.setattr(collectives, "all_reduce", lambda x, codec="none": None)
    assert len(engine.self_test(0, 2)["problems"]) == 2
    monkeypatch.setattr(collectives, "all_reduce", lambda x, codec="none": x.mul_(1.5))
    assert len(engine.self_test(0, 1)["problems"]) == 2


def test_wrong_variable_fails_before_ranks_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTCOMM_STAGING", "sideways")
    status, checks = _report(capsys)
    assert status == 1 and "engine" not in checks
    assert checks["variables"]["status"] == "FAIL" and "sideways" in checks["variables"]["summary"]


def test_unknown_variable_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_KERNELS", "avx2")
    check = machine.variables()
    assert check.status == "note" and check.details["unknown"] == ["DTCOMM_KERNELS"]


def test_forced_kernel_is_noted() -> None:
    with ops.use("reference"):
        check = machine.kernels()
    assert check.status == "note" and check.details["current"] == "reference"


def test_more_ranks_than_cores_are_noted() -> None:
    usable = machine.usable_cores()
    assert not machine.cores(usable).details["oversubscribed"]
    assert machine.cores(usable + 1).status == "note"


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("1000 100000", 1)])
def test_container_quota_counts(monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(Path, "read_text", lambda _: quota)
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(
    ("ns", "words"), [(0.0, "not measured"), (20, "one core"), (100, "one L3"), (480, "different")]
)
def test_placement(ns: float, words: str) -> None:
    assert words in engine.placement(ns)


@pytest.mark.parametrize("value", ["0", "65", "two"])
def test_refuses_impossible_rank_counts(value: str) -> None:
    with pytest.raises(SystemExit) as error:
        doctor_command.main(["--nproc", value])
    assert error.value.code == 2
