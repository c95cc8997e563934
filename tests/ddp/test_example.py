from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples/ddp_char_gpt.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs_under_torchrun_and_resumes(tmp_path: Path) -> None:
    prefix = str(tmp_path / "model")
    first = torchrun("--steps", "3", "--checkpoint", prefix)
    assert "step    0  loss" in first
    assert "policy: ndim<2" in first
    second = torchrun("--steps", "18", "--checkpoint", prefix, "--resume")
    assert "step   20  loss" in second
    assert "step    0" not in second
