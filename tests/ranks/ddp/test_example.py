from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


def torchrun(script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    completed = subprocess.run(
        [*command, str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_the_example_runs_under_torchrun_and_resumes(tmp_path: Path) -> None:
    prefix = str(tmp_path / "model")
    first = torchrun("ddp_char_gpt.py", "--steps", "3", "--checkpoint", prefix)
    assert "step    0  loss" in first
    assert "int8, feedback" in first and "verdict" in first
    second = torchrun("ddp_char_gpt.py", "--steps", "18", "--checkpoint", prefix, "--resume")
    assert "step   20  loss" in second
    assert "step    0" not in second


def test_vision_example_learns_and_writes_a_trace(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    trace = tmp_path / "digits.json"
    output = torchrun("ddp_digits_cnn.py", "--codec", "int4", "--epochs", "2", "--trace", str(trace))
    accuracy = float(output.split("epoch 1")[1].split("accuracy ")[1].split("%")[0])
    assert accuracy > 60  # of ten digits
    assert "efficiency" in output and "int4" in output
    assert (tmp_path / "digits.rank1.json").exists()
