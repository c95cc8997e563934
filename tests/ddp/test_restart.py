"""A rank is killed in a backward pass: the others say which, torchrun starts all again, and training goes on."""

from __future__ import annotations

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


def torchrun(folder: Path, killed_at: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        "--max-restarts",
        "1",
        "--monitor-interval",
        "2",
    ]  # the survivor is to speak before it is ended
    done = subprocess.run(
        [*command, "-m", "tests.ddp.restarting", str(folder), str(killed_at)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_in_backward_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run_ranks(uninterrupted, 2, str(tmp_path / "whole"))
    killed = torchrun(tmp_path / "killed", 4)
    assert re.search(r"survivor 0: .*rank 1 .*pid \d+", killed), killed
    ends = {int(rank): float(total) for rank, total in re.findall(r"rank (\d) from 4: (\S+)", killed)}
    assert ends == {rank: total for rank, (_, total) in enumerate(whole)}
