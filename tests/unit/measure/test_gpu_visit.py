"""The steps of a visit to a GPU: order, limits, what is kept when a command ends early, and what runs the next time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cuda import gpu_check
from tests.cuda.gpu_check import Step, remaining, run_all


def python(name: str, code: str, seconds: float = 60) -> Step:
    return Step(name, [sys.executable, "-c", code], seconds)


def test_the_most_valuable_steps_come_first(tmp_path: Path) -> None:
    steps = gpu_check.visit([], tmp_path, tmp_path / "passed.txt")
    names = [step.name for step in steps]
    assert names[:6] == ["device", "communication", "inference", "bench-fused", "fused", "bench-codecs"]
    assert names[6:9] == ["memcheck", "racecheck", "kernels"] and set(names[9:]) <= {"bench-threads"}
    assert all(step.seconds <= 250 for step in steps)  # several of them fit into a command of ten minutes
    # A benchmark stops itself before it is cut off, and writes its result to the folder of the visit.
    for step in steps:
        if "--seconds" in step.command:
            assert float(step.command[step.command.index("--seconds") + 1]) < step.seconds
            assert str(tmp_path) in step.command[step.command.index("--json") + 1]


def test_unfinished_steps_run_before_failed_ones() -> None:
    steps = [python(name, "") for name in "abcde"]
    outcomes = {
        "a": "passed",
        "b": "FAILED with status 1",
        "c": "NOT RUN: no time was left",
        "e": "CUT OFF after 9 s",
    }
    assert [step.name for step in remaining(steps, outcomes)] == ["c", "d", "b", "e"]


def test_a_repeated_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, state = tmp_path / "out", tmp_path / "kept" / "visit.json"
    out.mkdir()
    mended = tmp_path / "mended"
    steps = [
        python("good", "print('once')"),
        python("bad", f"import os, sys; sys.exit(not os.path.exists({str(mended)!r}))"),
        python("late", "print('later')"),
    ]
    assert run_all(steps[:2], 60, out, state) == 1
    assert json.loads(state.read_text()) == {"good": "passed", "bad": "FAILED with status 1"}
    assert (out / "visit.json").read_text() == state.read_text()
    mended.touch()
    (out / "good.log").unlink()
    assert run_all(steps, 0, out, state) == 1  # no time: what was known stays known
    assert json.loads(state.read_text())["bad"] == "FAILED with status 1"
    assert run_all(steps, 60, out, state) == 0
    assert not (out / "good.log").exists() and (out / "late.log").read_text() == "later\n"
    assert "good             before  passed" in capsys.readouterr().out
    assert set(json.loads(state.read_text()).values()) == {"passed"}


@pytest.mark.parametrize("workers", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)])
def test_a_repeated_step_leaves_out_tests_that_have_passed(
    workers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mended, passed = tmp_path / "mended", tmp_path / "passed.txt"
    (tmp_path / "test_example.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        f"def test_number(n): assert n != 2 or os.path.exists({str(mended)!r})\n"
    )
    options = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.cuda.skip_passed", *workers]
    step = Step("numbers", [sys.executable, *options, "--passed", str(passed), str(tmp_path)], 60)
    (tmp_path / "out").mkdir()
    for status, prints in ((1, "1 failed, 3 passed"), (0, "1 passed"), (0, "numbers")):
        state = tmp_path / "visit.json"
        assert run_all([step], 60, tmp_path / "out", state) == status
        state.unlink()
        assert prints in capsys.readouterr().out
        mended.touch()
    names = passed.read_text().split()
    assert (
        len(names) == len(set(names)) == 4 and (tmp_path / "out" / "passed.txt").read_text().split() == names
    )


def test_nothing_else_runs_without_a_device(tmp_path: Path) -> None:
    steps = [python("device", "raise SystemExit(3)"), python("kernels", "")]
    assert run_all(steps, 60, tmp_path, tmp_path / "visit.json") == 1
    assert not (tmp_path / "kernels.log").exists()


def test_every_device_test_belongs_to_one_step() -> None:
    """A file that no step names belongs to communication, which runs the folder without the files of the others."""
    commands = {step.name: list(step.command) for step in gpu_check.steps([])}
    files = {str(path) for path in gpu_check.HERE.glob("test_*.py")}
    named = {
        name: {argument for argument in commands[name] if argument in files}
        for name in ("inference", "fused", "kernels")
    }
    assert named["inference"] == {str(gpu_check.HERE / "test_inference.py")}
    assert named["fused"] and named["kernels"] and not named["fused"] & named["kernels"]
    ignored = {
        argument.removeprefix("--ignore=")
        for argument in commands["communication"]
        if argument.startswith("--ignore=")
    }
    assert ignored == set().union(*named.values())
    assert str(gpu_check.HERE) in commands["communication"]
