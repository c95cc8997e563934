"""A rank's share of checkpoints, and the refusal of checkpoints that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtcomm.compress.checkpoint import COUNT, seal, select_share, tensors


def state(rank: int, world_size: int) -> dict[str, Any]:
    residuals = {"w": torch.full((4,), float(rank + 1))}
    entries = {"steps": 9, "seed": 2, "rank": rank, "world_size": world_size, "options": {}}
    return seal({**entries, "residuals": residuals})


CHECKS = {"steps": COUNT, "residuals": tensors({"w": 4, "other": 7})}


def test_a_rank_selects_its_share_from_one_state_or_all() -> None:
    first, alone = select_share(state(1, 3), 1, 3, CHECKS)
    _, chosen = select_share([state(rank, 3) for rank in range(3)], 1, 3, CHECKS)
    assert alone["w"].tolist() == chosen["w"].tolist() == [2.0] * 4
    assert (first["steps"], first["seed"]) == (9, 2)


def test_another_number_of_ranks_needs_all_states_and_keeps_their_sum() -> None:
    states = [state(rank, 3) for rank in range(3)]
    shares = [select_share(states, rank, 2, CHECKS)[1]["w"] for rank in range(2)]
    assert torch.stack(shares).sum(0).tolist() == [6.0] * 4
    with pytest.raises(ValueError, match="saved by one of 3 ranks, the group has 2"):
        select_share(states[0], 0, 2, CHECKS)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([], "got none"),
        ([state(1, 2), state(0, 2)], r"ranks \[1, 0\]: expected all 2"),
        ([state(0, 2)], r"ranks \[0\]: expected all 2"),
        ({**state(0, 2), "version": 0}, "version 0"),
        ({}, "state: has no version"),
    ],
)
def test_incomplete_sets_of_states_are_refused(saved: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_share(saved, 0, 2, CHECKS)
