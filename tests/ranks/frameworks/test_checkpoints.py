"""Checkpoints of frameworks: other numbers of ranks, other specs, models that the program compresses itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import dtcomm.frameworks
from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks
from tests.ranks.frameworks.sessions import data, forget_accelerate, loss_of, make_net, set_environment

pytest.importorskip("accelerate", reason="pip install accelerate")


def accelerator_and_model(rank: int, n: int, spec: str) -> tuple[Any, Any, Any]:
    set_environment(rank, n)
    from accelerate import Accelerator

    forget_accelerate()
    accelerator = Accelerator(cpu=True)
    attached = ddp.attach(accelerator, spec)
    return accelerator, attached, accelerator.prepare(make_net())


def residuals_of(state: Any) -> torch.Tensor:
    """Return this rank's residuals as one vector; zeros if it has none."""
    residuals = state.state_dict()["residuals"]
    return torch.cat([residuals.get(name, torch.zeros(2048)) for name in ("0.weight", "2.weight")])


def save_after_two_steps(rank: int, n: int, folder: Path) -> torch.Tensor:
    accelerator, attached, model = accelerator_and_model(rank, n, "int4")
    for row in data()[2 * rank : 2 * rank + 2]:
        accelerator.backward(loss_of(model, {name: value[None] for name, value in row.items()}))
    accelerator.save_state(str(folder))
    return residuals_of(attached.state)


def load(rank: int, n: int, folder: Path, spec: str, strict: bool) -> torch.Tensor:
    accelerator, attached, _ = accelerator_and_model(rank, n, spec)
    attached.strict = strict
    accelerator.load_state(str(folder))
    assert attached.state.steps == 2
    return residuals_of(attached.state)


def test_another_number_of_ranks_keeps_the_sum_of_the_residuals(tmp_path: Path) -> None:
    saved = run_ranks(save_after_two_steps, 2, tmp_path)
    loaded = run_ranks(load, 3, tmp_path, "int4", True)
    assert not torch.equal(saved[0], saved[1])
    torch.testing.assert_close(sum(loaded), sum(saved))


def test_another_spec_is_refused_unless_strict_is_off(tmp_path: Path) -> None:
    saved = run_ranks(save_after_two_steps, 2, tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}/dtcomm: state: saved with spec=.*int4"):
        run_ranks(load, 2, tmp_path, "int8", True)
    loaded = run_ranks(load, 2, tmp_path, "int8", False)
    assert all(torch.equal(*pair) for pair in zip(saved, loaded))


def save_and_load_own_state(rank: int, n: int, folder: Path) -> None:
    set_environment(rank, n)
    from accelerate import Accelerator

    forget_accelerate()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_net())
    assert isinstance(model, DistributedDataParallel)
    state = ddp.compress(model, "int4")
    dtcomm.frameworks.save_with(accelerator, state)
    loss_of(model, {name: value[None] for name, value in data()[rank].items()}).backward()
    saved = residuals_of(state)
    accelerator.save_state(str(folder))
    state.rescale(0.0)
    assert not residuals_of(state).any()
    accelerator.load_state(str(folder))
    assert torch.equal(residuals_of(state), saved)


def test_a_state_that_the_program_made_itself_is_saved_too(tmp_path: Path) -> None:
    run_ranks(save_and_load_own_state, 2, tmp_path)
