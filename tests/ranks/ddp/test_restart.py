"""A rank is killed in a backward pass: the others name it, torchrun restarts all ranks, and training continues."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtcomm.launch.ranks import run_ranks
from tests.support.elastic_ranks import run_elastic
from tests.unit.ddp.restarting_script import main, train


def train_uninterrupted(rank: int, world_size: int, folder: str) -> tuple[int, float]:
    return train(Path(folder), -1)


@pytest.mark.slow
def test_restarted_run_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    uninterrupted_results = run_ranks(train_uninterrupted, 2, str(tmp_path / "whole"))
    run_elastic(main, 2, str(tmp_path / "killed"), 4, restarts=1)
    survivor = (tmp_path / "killed" / "survivor0.txt").read_text()
    assert re.search(r"rank 1 .*pid \d+", survivor), survivor
    ends = [json.loads((tmp_path / "killed" / f"end{rank}.json").read_text()) for rank in range(2)]
    assert ends == [[4, total] for _, total in uninterrupted_results]
