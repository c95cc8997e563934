"""DDP and FSDP2 started again by torchrun with other numbers of ranks: the residuals keep their sum."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.ranks.elastic.restarting_script import STEPS, main
from tests.support.elastic_ranks import run_elastic


@pytest.mark.slow
def test_residuals_keep_their_sum_from_four_to_two_to_three_ranks(tmp_path: Path) -> None:
    starts: list[dict[str, Any]] = []
    for start, ranks in enumerate((4, 2, 3)):
        run_elastic(main, ranks, str(tmp_path), start)
        starts.append(json.loads((tmp_path / f"start {start}.json").read_text()))
    assert [start["ranks"] for start in starts] == [4, 2, 3]
    for kind in ("ddp", "fsdp"):
        runs = [start[kind] for start in starts]
        assert [run["began"] for run in runs] == [0, STEPS, 2 * STEPS]
        assert runs[0]["loaded"] == 0
        for before, after in itertools.pairwise(runs):
            assert before["saved"] != 0
            assert after["loaded"] == pytest.approx(before["saved"], rel=1e-4)
        assert runs[2]["loss"] < runs[0]["loss"]
