"""Compressor state through torch.distributed.checkpoint, on the same and on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint

from dtcomm import ddp
from dtcomm.compress.checkpoint import Checkpointed, restore
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import backward, wrapped


def save(rank: int, n: int, path: Path) -> dict[str, Any]:
    model = wrapped()
    state = ddp.compress(model, "int4")
    for step in range(3):
        backward(model, rank, step)
    checkpoint.save({"model": model.state_dict(), "compression": Checkpointed(state)}, checkpoint_id=path)
    return dict(state.state_dict())


def load(rank: int, n: int, path: Path) -> dict[str, Any]:
    model = wrapped()
    state = ddp.compress(model, "int4")
    restore(state, path, "compression")
    restored = dict(state.state_dict())
    backward(model, rank, 3)
    return restored


def load_with_torch(rank: int, n: int, path: Path) -> dict[str, Any]:
    model = wrapped()
    state = ddp.compress(model, "int4")
    target = {"model": model.state_dict(), "compression": Checkpointed(state)}
    checkpoint.load(target, checkpoint_id=path)
    return dict(state.state_dict())


def test_ranks_get_their_own_states_on_the_same_number_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, tmp_path / "run")
    for loaded in (run_ranks(load, 2, tmp_path / "run"), run_ranks(load_with_torch, 2, tmp_path / "run")):
        for before, after in zip(saved, loaded, strict=True):
            assert before["residuals"].keys() == after["residuals"].keys() and before["residuals"]
            for name, residual in before["residuals"].items():
                assert torch.equal(residual, after["residuals"][name])
    name = next(iter(saved[0]["residuals"]))
    assert not torch.equal(*(state["residuals"][name] for state in saved))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2)])
def test_residuals_keep_their_sum_on_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    saved = run_ranks(save, before, tmp_path / "run")
    loaded = run_ranks(load, after, tmp_path / "run")
    for name in saved[0]["residuals"]:
        total = sum(state["residuals"][name].double() for state in saved)
        restored = sum(state["residuals"][name].double() for state in loaded if name in state["residuals"])
        assert torch.allclose(total, restored, atol=1e-7)  # type: ignore[arg-type]


def check_refusals(rank: int, n: int, path: Path) -> None:
    model = wrapped()
    state = ddp.compress(model, "int4")
    backward(model, rank, 0)
    with pytest.raises(ValueError, match=r"key: no compressor was saved under 'other'.*compression"):
        restore(state, path, "other")
    # Without `Checkpointed` all ranks would get one rank's residuals, which is detected.
    bare = path.with_name("bare")
    checkpoint.save({"compression": state}, checkpoint_id=bare)
    message = ""
    try:
        checkpoint.load({"compression": state}, checkpoint_id=bare)
    except (ValueError, checkpoint.CheckpointException) as error:
        message = str(error)
    messages: list[Any] = [None] * n
    dist.all_gather_object(messages, message)
    assert any("wrap it in dtcomm.compress.checkpoint.Checkpointed" in text for text in messages), messages


def test_invalid_calls_are_refused(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path / "run")
    run_ranks(check_refusals, 2, tmp_path / "run")
