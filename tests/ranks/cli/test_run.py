"""`dtcomm run`: a script's DDP and FSDP2 modules are compressed as an explicit call does it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("training_script.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RUN = ("-m", "dtcomm", "run", "--codec", "int4")


def python(*arguments: str, fails: bool = False) -> tuple[str, str]:
    """Run Python with arguments; return what it wrote to its outputs."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout, done.stderr


def losses_of(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("losses"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_losses_are_those_of_an_explicit_call(kind: str) -> None:
    plain = python(*TORCHRUN, SCRIPT, kind, "plain")[0]
    explicit = python(*TORCHRUN, SCRIPT, kind, "compressed")[0]
    run = python(*TORCHRUN, *RUN, SCRIPT, kind, "plain")[0]
    assert losses_of(run) == losses_of(explicit) != losses_of(plain)
    assert run.count(f"dtcomm {kind.upper()}: ") == 1 and "rank 0 of 2, 6 steps" in run and "int4" in run


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_script_that_compresses_itself_is_left_alone(kind: str) -> None:
    explicit = python(*TORCHRUN, SCRIPT, kind, "compressed")[0]
    output, errors = python(
        "-m", "dtcomm", "run", "--nproc-per-node", "2", "--codec", "int8", SCRIPT, kind, "compressed"
    )
    assert losses_of(output) == losses_of(explicit)
    assert errors.count("is left alone") == 1 and "verdict" not in output


def test_a_script_without_a_model_is_told_what_is_compressed() -> None:
    errors = python(*TORCHRUN, *RUN, SCRIPT, "none", "plain")[1]
    assert errors.count("made no DistributedDataParallel, nor called fully_shard") == 1


def test_the_traceback_of_a_script_begins_with_the_script() -> None:
    output, errors = python(*TORCHRUN, *RUN, SCRIPT, "ddp", "failing", fails=True)
    assert "verdict" not in output and "LookupError: of the script" in errors
    assert "runpy" not in errors.split("LookupError")[0] and f'File "{SCRIPT}"' in errors
