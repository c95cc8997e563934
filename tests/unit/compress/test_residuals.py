"""Residuals: their memory, checkpoints, and redistribution among another number of ranks."""

from __future__ import annotations

import pytest
import torch

from dtcomm.compress.residuals import Residuals, redistribute


def test_a_residual_starts_as_zeros_and_keeps_its_memory() -> None:
    residuals = Residuals()
    gradient = torch.randn(7, dtype=torch.bfloat16)
    first = residuals.get("w", gradient)
    assert first.dtype == torch.float32
    assert first.shape == (7,)
    assert not first.any()
    assert residuals.get("w", gradient) is first


def test_a_loaded_residual_of_another_size_is_refused_by_name() -> None:
    residuals = Residuals()
    residuals.load_state_dict({"w": torch.zeros(5)})
    with pytest.raises(ValueError, match="'w' has 5 elements, its gradient 7"):
        residuals.get("w", torch.zeros(7))


def test_a_state_is_a_copy_in_both_directions() -> None:
    residuals, other = Residuals(), Residuals()
    residuals.get("w", torch.zeros(3)).fill_(1.0)
    saved = residuals.state_dict()
    other.load_state_dict(saved)
    residuals.get("w", torch.zeros(3)).fill_(2.0)
    saved["w"].fill_(3.0)
    assert other.get("w", torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_only_fp32_tensors_can_be_loaded() -> None:
    with pytest.raises(ValueError, match="residual of 'w'"):
        Residuals().load_state_dict({"w": torch.zeros(3, dtype=torch.float64)})


def test_scale_follows_a_loss_scale() -> None:
    residuals = Residuals()
    residuals.get("w", torch.zeros(2)).fill_(8.0)
    residuals.scale(0.25)
    assert residuals.get("w", torch.zeros(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 7])
def test_the_sum_over_ranks_survives_a_change_of_world_size(before: int, after: int) -> None:
    # Integers, so that the sums are exact; "late" exists on the last rank only.
    states = [{"w": torch.randint(-50, 50, (11,)).float()} for _ in range(before)]
    states[-1]["late"] = torch.full((3,), 4.0)
    shared = [redistribute(states, rank, after) for rank in range(after)]
    for name in ("w", "late"):
        old = sum(state[name] for state in states if name in state)
        new = sum(state[name] for state in shared if name in state)
        assert torch.equal(torch.as_tensor(old), torch.as_tensor(new))


def test_redistribution_does_not_change_its_inputs() -> None:
    states = [{"w": torch.ones(2)}, {"w": torch.ones(2)}]
    redistribute(states, 0, 1)
    assert states[0]["w"].tolist() == [1.0, 1.0]


def test_redistribution_refuses_sizes_that_differ_and_ranks_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="residual of 'w'"):
        redistribute([{"w": torch.ones(2)}, {"w": torch.ones(3)}], 0, 1)
    with pytest.raises(ValueError, match="rank 2 of world_size 2"):
        redistribute([], 2, 2)


def test_backups_are_restored_unless_they_were_dropped() -> None:
    residuals = Residuals("int8")
    for name in ("applied", "failed"):
        residuals.add(name, torch.linspace(-1, 1, 64))
    before = residuals.state_dict()
    for name in ("applied", "failed"):
        residuals.back_up(name)
        residuals.get(name, torch.zeros(64)).mul_(2)
        residuals.put(name)
    residuals.drop_backups(["applied", "unknown"])
    residuals.restore()
    after = residuals.state_dict()
    assert torch.equal(after["failed"], before["failed"])
    assert not torch.allclose(after["applied"], before["applied"], atol=0.1)
    residuals.back_up("failed")
    residuals.drop_backups()
    residuals.reset("failed")
    residuals.restore()
    assert "failed" not in residuals
