"""python -m tests.stress: the commands of the programs, the seed, the exit status, and how to repeat a failure."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

from tests.stress import __main__ as command
from tests.stress import fuzz
from tests.stress.__main__ import PROGRAMS


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands instead of running them; the soak fails."""
    commands: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(words[1:])
        return subprocess.CompletedProcess(words, int("tests.stress.soak" in words))

    monkeypatch.setattr(command.subprocess, "run", run)
    return commands


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_accepts_its_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS[name]
    module = importlib.import_module(f"tests.{program.module}")
    parsed: list[Any] = []

    def parse(parser: Any, arguments: list[str]) -> None:
        parsed.append(original(parser, arguments))
        raise KeyboardInterrupt

    original = module.argparse.ArgumentParser.parse_args
    monkeypatch.setattr(module.argparse.ArgumentParser, "parse_args", parse)
    for seconds in (5.0, 340.0):
        with pytest.raises(KeyboardInterrupt):
            module.main(program.command(12345, seconds, "file.json")[2:])
    assert [options.json for options in parsed] == ["file.json"] * 2
    if hasattr(parsed[0], "minutes"):
        assert [options.minutes for options in parsed] == [pytest.approx(5 / 60, abs=0.01), 5.67]
    assert 12345 in vars(parsed[0]).values() or name in ("torch_suite", "limits")


def test_a_failing_program_is_named_with_its_command(
    runs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--minutes", "8", "--seed", "7"]) == 1
    assert [words[1] for words in runs] == [f"tests.{program.module}" for program in PROGRAMS.values()]
    shown = capsys.readouterr().out
    assert "to repeat it: python -m tests.stress.soak --seed 7 --minutes 1.0" in shown
    assert f"seed 7: {len(PROGRAMS) - 1} of {len(PROGRAMS)} programs passed; failed: ['soak']" in shown


def test_each_run_has_a_new_seed_and_one_program_has_all_the_time(runs: list[list[str]]) -> None:
    for _ in range(2):
        assert command.main(["--minutes", "3", "--program", "operations"]) == 0
    first, second = runs
    assert first[first.index("--minutes") + 1] == "3.0"
    assert first[first.index("--seed") + 1] != second[second.index("--seed") + 1]


def test_a_program_that_hangs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(command.subprocess, "run", run)
    assert command.main(["--program", "fuzz"]) == 1


def test_the_programs_are_listed(runs: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PROGRAMS) and not runs


def test_counts_of_the_fuzzer() -> None:
    text = "20 payloads, 13 combinations, 4 kernels, seed 5, 3.5 s\n"
    text += "  none   9 decoded, 0 rejected\n  topk   11 decoded, 5 rejected\n"
    assert fuzz.parse_output(text) == {
        "payloads": 20,
        "combinations": 13,
        "kernels": 4,
        "families": {"none": {"payloads": 9, "rejected": 0}, "topk": {"payloads": 11, "rejected": 5}},
    }
    with pytest.raises(ValueError, match="fuzz_payloads_test"):
        fuzz.parse_output("ERROR: AddressSanitizer")


@pytest.mark.slow
def test_a_program_runs_in_a_process() -> None:
    arguments = ["--program", "rendezvous", "--minutes", "0.02"]
    assert subprocess.run([sys.executable, "-m", "tests.stress", *arguments], check=False).returncode == 0
