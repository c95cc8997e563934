"""A rank is killed in a backward pass: the others say which, torchrun starts all again, and training goes on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtcomm.testing.ranks import run_ranks
from tests.ddp.restarting import train

ROOT = Path(__file__).parents[2]


def uninterrupted(rank: int, world_size: int, folder: str) -> tuple[int, float]:
    return train(Path(folder), -1)


def torchrun(folder: Path, killed_at: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1"]
    done = subprocess.run(
        [*command, "-m", "tests.ddp.restarting", str(folder), str(killed_at)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_in_backward_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run_ranks(uninterrupted, 2, str(tmp_path / "whole"))
    torchrun(tmp_path / "killed", 4)
    survivor = (tmp_path / "killed" / "survivor0.txt").read_text()
    assert re.search(r"rank 1 .*pid \d+", survivor), survivor
    ends = [json.loads((tmp_path / "killed" / f"end{rank}.json").read_text()) for rank in range(2)]
    assert ends == [[4, total] for _, total in whole]
