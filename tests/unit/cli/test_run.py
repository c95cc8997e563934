"""The command line of `dtcomm run`: what it refuses, and how it starts torchrun."""

from __future__ import annotations

import os
import sys

import pytest

from dtcomm.cli import run

SCRIPT = __file__


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--codec", "int9", SCRIPT], "codec: unknown"),
        (["--codec", "auto", "--verify", "3", SCRIPT], "verify: 'auto' measures by itself"),
        (["--parameters", "ef:int8", SCRIPT], "parameters: 'ef:' is not valid here"),
        (["--guard", "panic", SCRIPT], "invalid choice: 'panic'"),
        (["--feedback", "maybe", SCRIPT], "invalid choice: 'maybe'"),
        (["train"], "there is no file 'train'; for a module use -m train"),
        ([], "required: script"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        run.main(arguments)
    assert refused.value.code == 2 and error in capsys.readouterr().err


def test_what_follows_the_script_belongs_to_it() -> None:
    arguments = run.make_parser().parse_args(
        ["--codec", "int4", "-m", "train", "--codec", "x", "--json", "y"]
    )
    assert arguments.codec == "int4" and arguments.json is None and arguments.module
    assert arguments.arguments == ["--codec", "x", "--json", "y"]


def test_ranks_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def execute(path: str, arguments: list[str]) -> None:
        raise Started(path, arguments)

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.delenv("RANK", raising=False)
    command = ["--nproc-per-node", "2", "--codec", "int4", SCRIPT, "--epochs", "3"]
    with pytest.raises(Started) as started:
        run.main(command)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    expected = [sys.executable, *torchrun, "-m", "dtcomm", "run", *command]
    assert started.value.args == (sys.executable, expected)
