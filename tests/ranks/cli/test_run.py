"""`dtcomm run`: a script's DDP and FSDP2 modules are compressed as an explicit call does it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from dtcomm.cli import run
from tests.support.rank_tests import on_ranks

SCRIPT = str(Path(__file__).with_name("training_script.py"))


def run_script(rank: int, *arguments: str, plain: bool = False) -> tuple[str, str]:
    """Run a command line, or the script without dtcomm if it is ``plain``, in this rank; return what it printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as output:
        patch.setenv("RANK", str(rank))
        patch.setattr(sys, "argv", [SCRIPT, *arguments])
        patch.setattr(sys, "path", ["", *sys.path])
        with redirect_stderr(StringIO()) as errors, pytest.raises(SystemExit) as end:
            if plain:
                run.runpy.run_path(SCRIPT, run_name="__main__")
                sys.exit(0)
            sys.exit(run.main(arguments))
        assert bool(end.value.code) == ("failing" in arguments), errors.getvalue()
    return output.getvalue(), errors.getvalue()


def losses_of(output: str) -> str:
    return next((line for line in output.splitlines() if line.startswith("losses")), "")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2)
def test_the_losses_are_those_of_an_explicit_call(rank: int, ranks: int, kind: str) -> None:
    plain = losses_of(run_script(rank, kind, "plain", plain=True)[0])
    explicit = losses_of(run_script(rank, kind, "compressed", plain=True)[0])
    output, errors = run_script(rank, "--codec", "int4", SCRIPT, kind, "plain")
    assert not errors
    if rank:
        assert not output
    else:
        assert losses_of(output) == explicit != plain
        assert output.count(f"dtcomm {kind.upper()}: ") == 1
        assert "rank 0 of 2, 12 steps" in output and "int4" in output
    # What the command replaced is as before.
    assert losses_of(run_script(rank, kind, "plain", plain=True)[0]) == plain


@pytest.mark.parametrize(
    ("kind", "own", "says"),
    [
        (
            "ddp",
            "compressed",
            "a DistributedDataParallel has a communication hook of the script and is left alone",
        ),
        (
            "ddp",
            "hooked",
            "a DistributedDataParallel has a communication hook of the script and is left alone",
        ),
        (
            "ddp",
            "builtin",
            "a DistributedDataParallel has a communication hook of the script and is left alone",
        ),
        ("fsdp", "compressed", "an FSDP2 model has collectives that the script chose and is left alone"),
        ("ddp", "idle", "a model of the script was not compressed: it was never called"),
        (
            "none",
            "plain",
            "nothing was compressed: the script made no DistributedDataParallel, nor called fully_shard",
        ),
    ],
)
@on_ranks(2)
def test_what_is_not_compressed_is_said_once(rank: int, ranks: int, kind: str, own: str, says: str) -> None:
    output, errors = run_script(rank, SCRIPT, kind, own)
    assert errors == ("" if rank else f"dtcomm run: {says}\n") and "verdict" not in output
    if own in ("compressed", "hooked", "builtin"):
        explicit = losses_of(run_script(rank, kind, own, plain=True)[0])
        assert losses_of(output) == explicit and bool(explicit) == (rank == 0)


@on_ranks(2)
def test_a_module_options_and_the_report_as_json(rank: int, ranks: int) -> None:
    options = ["--codec", "int4", "--exclude", "0", "--guard", "off", "--feedback", "on", "--json", "-"]
    output, errors = run_script(rank, *options, "-m", "tests.ranks.cli.training_script", "ddp", "plain")
    assert not errors and bool(output) == (rank == 0)
    if rank == 0:
        (report,) = json.loads(output[output.index("{") :])["reports"]
        assert (report["integration"], report["world_size"], report["feedback"]) == ("DDP", 2, True)
        codecs = {name: row["codec"] for row in report["rows"] for name in row["names"]}
        assert codecs == {"0.weight": "none", "0.bias": "none", "2.weight": "int4", "2.bias": "none"}


@on_ranks(2)
def test_pairs_of_steps_are_measured_and_the_report_is_written_by_rank_0(
    rank: int, ranks: int, tmp_path: Path
) -> None:
    file = tmp_path / f"report{rank}.json"
    run_script(rank, "--parameters", "int8", "--verify", "1", "--json", str(file), SCRIPT, "fsdp", "plain")
    assert file.exists() == (rank == 0)
    if rank == 0:
        (report,) = json.loads(file.read_text())["reports"]
        assert {row["what"] for row in report["rows"]} == {"gradients", "parameters"}
        assert 0 < report["wire_bytes"] < report["plain_bytes"]
        assert report["payoff"]["compressed_ms"] > 0 and report["payoff"]["verdict"]


@on_ranks(2)
def test_the_traceback_of_a_script_begins_with_the_script(rank: int, ranks: int) -> None:
    output, errors = run_script(rank, SCRIPT, "ddp", "failing")
    assert "verdict" not in output and "LookupError: of the script" in errors
    assert "runpy" not in errors.split("LookupError")[0] and f'File "{SCRIPT}"' in errors


def test_the_command_starts_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself reads the command line that replaces the process."""
    started: list[list[str]] = []

    def start(program: str, command: list[str]) -> None:
        started.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", start)
    monkeypatch.delenv("RANK", raising=False)
    arguments = ["--nproc-per-node", "2", "--codec", "int8", SCRIPT, "ddp", "plain"]
    with pytest.raises(SystemExit):
        run.main(arguments)
    (command,) = started
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    config, program, rest = torchrun.config_from_args(torchrun.parse_args(command[3:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 2)
    assert program == sys.executable and rest[1:] == ["-m", "dtcomm", "run", *arguments]
