"""The visit to a GPU: order and limits of the steps, what is kept when one fails, and a rehearsal of all on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bench import visit as gpu_visit
from bench.common import visit_steps
from bench.visit import STEPS, Step, visit
from dtcomm.kernels import dispatch


def outcomes(out: Path) -> dict[str, Any]:
    return {record["step"]: record for record in json.loads((out / "visit.json").read_text())}


def test_steps_come_in_order_of_value_and_fit_into_the_visit() -> None:
    assert [step.name for step in STEPS[:4]] == ["about", "profile", "training", "kernels"]
    assert sum(step.seconds for step in STEPS) <= 500
    assert {step.name for step in STEPS} == set(visit_steps.PROGRAMS)
    assert all(step.decides for step in STEPS)


def program(code: str) -> Any:
    return lambda step, out, rehearse, seconds: [
        "sh",
        "-c",
        code.replace("NAME", step.name).replace("OUT", str(out)),
    ]


def test_what_is_known_is_kept_when_steps_fail_or_last_too_long(tmp_path: Path) -> None:
    steps = [Step("about", 60, "a"), Step("bad", 60, "b"), Step("slow", 6, "c"), Step("last", 60, "d")]
    code = "case NAME in bad) echo why; exit 7;; slow) exec sleep 100;; esac; "
    code += """echo '{"lines": ["fact"]}' >OUT/NAME.json"""
    with mock.patch.object(gpu_visit, "command", program(code)):
        assert visit(steps, tmp_path, 100) == 1
    found = outcomes(tmp_path)
    assert found["about"]["outcome"] == found["last"]["outcome"] == "passed"
    assert found["last"]["found"] == {"lines": ["fact"]} and found["last"]["decides"] == "d"
    assert found["bad"]["outcome"] == "FAILED with status 7: why"
    assert found["slow"]["outcome"].startswith("CUT OFF after 6 s")


def test_without_a_device_or_time_or_tool_steps_say_so(tmp_path: Path) -> None:
    with mock.patch.object(gpu_visit, "command", program("exit 3")):
        assert visit([Step("about", 60, "a"), Step("other", 60, "b")], tmp_path / "device", 100) == 1
    assert outcomes(tmp_path / "device")["other"]["outcome"] == "NOT RUN: no device"
    assert visit([Step("about", 60, "a")], tmp_path / "time", 0) == 1
    assert outcomes(tmp_path / "time")["about"]["outcome"] == "NOT RUN: no time was left"
    with mock.patch.object(gpu_visit, "tool_path", lambda tool: None):
        assert visit([Step("profile", 60, "a", "ncu")], tmp_path / "tool", 100) == 1
    assert "ncu was not found" in outcomes(tmp_path / "tool")["profile"]["outcome"]


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in dispatch.available(), reason="AVX2's kernels stand in for CUDA's")
def test_every_step_can_be_rehearsed_without_a_device(tmp_path: Path) -> None:
    pytest.importorskip("dtcomm._emulator", reason="_emulator was not built; make emulator builds it")
    status = visit(STEPS, tmp_path, 2000, rehearse=True)
    found = outcomes(tmp_path)
    assert {name: record["outcome"] for name, record in found.items()} == dict.fromkeys(found, "passed")
    assert status == 0 and all(record["found"]["lines"] for record in found.values())
    cases = [row["case"] for row in found["training"]["found"]["rows"]]
    assert cases[0] == "no hook" and "int8, guarded" in cases and "int8, one launch a slice" in cases
