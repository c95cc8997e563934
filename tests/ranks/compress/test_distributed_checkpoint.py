"""Compressor state through torch.distributed.checkpoint, on as many ranks and on others."""

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
    found = dict(state.state_dict())
    backward(model, rank, 3)
    return found


def load_alike(rank: int, n: int, path: Path) -> dict[str, Any]:
    model = wrapped()
    state = ddp.compress(model, "int4")
    wanted = {"model": model.state_dict(), "compression": Checkpointed(state)}
    checkpoint.load(wanted, checkpoint_id=path)
    return dict(state.state_dict())


def test_as_many_ranks_get_their_own(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, tmp_path / "run")
    for loaded in (run_ranks(load, 2, tmp_path / "run"), run_ranks(load_alike, 2, tmp_path / "run")):
        for before, after in zip(saved, loaded, strict=True):
            assert before["residuals"].keys() == after["residuals"].keys() and before["residuals"]
            for name, residual in before["residuals"].items():
                assert torch.equal(residual, after["residuals"][name])
    name = next(iter(saved[0]["residuals"]))
    assert not torch.equal(*(each["residuals"][name] for each in saved))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2)])
def test_others_keep_the_sum(before: int, after: int, tmp_path: Path) -> None:
    saved = run_ranks(save, before, tmp_path / "run")
    loaded = run_ranks(load, after, tmp_path / "run")
    for name in saved[0]["residuals"]:
        total = sum(each["residuals"][name].double() for each in saved)
        kept = sum(each["residuals"][name].double() for each in loaded if name in each["residuals"])
        assert torch.allclose(total, kept, atol=1e-7)  # type: ignore[arg-type]


def misused(rank: int, n: int, path: Path) -> None:
    model = wrapped()
    state = ddp.compress(model, "int4")
    backward(model, rank, 0)
    with pytest.raises(ValueError, match=r"key: no compressor was saved under 'other'.*compression"):
        restore(state, path, "other")
    # Bare, all ranks would get one rank's residuals: that does not go unnoticed.
    bare = path.with_name("bare")
    checkpoint.save({"compression": state}, checkpoint_id=bare)
    caught = ""
    try:
        checkpoint.load({"compression": state}, checkpoint_id=bare)
    except (ValueError, checkpoint.CheckpointException) as error:
        caught = str(error)
    seen: list[Any] = [None] * n
    dist.all_gather_object(seen, caught)
    assert any("wrap it in dtcomm.compress.checkpoint.Checkpointed" in each for each in seen), seen


def test_misuse_is_named(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path / "run")
    run_ranks(misused, 2, tmp_path / "run")
