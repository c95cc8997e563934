"""Trainer, Accelerate and Lightning, as installed, with DDP and with FSDP2: training, checkpoints, resuming.

One file, because the processes of a file are shared and importing the frameworks takes longer than any of the tests;
all are slow for that reason.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtcomm.frameworks
from dtcomm import ddp, local_sgd
from dtcomm.launch.ranks import run_ranks, spawn_ranks
from tests.ranks.frameworks import fsdp_sessions, sessions
from tests.ranks.frameworks.fsdp_sessions import PLAIN
from tests.ranks.frameworks.sessions import (
    EPOCHS,
    KILLED,
    RESUMED,
    SAVED_AT,
    STEPS_PER_EPOCH,
    WHOLE,
    data,
    forget_accelerate,
    loss_of,
    make_net,
    set_environment,
)

pytestmark = pytest.mark.slow

DDP_SESSIONS = {
    "accelerate": (sessions.accelerate_session, "step-4/dtcomm"),
    "transformers": (sessions.trainer_session, "checkpoint-4/dtcomm"),
    "lightning": (sessions.lightning_session, "dtcomm/epoch=0.ckpt"),
}
FSDP_SESSIONS = {
    "accelerate": (fsdp_sessions.accelerate_session, "step-4/dtcomm"),
    "transformers": (fsdp_sessions.trainer_session, "checkpoint-4/dtcomm"),
    "lightning": (fsdp_sessions.lightning_session, "epoch=0.ckpt/dtcomm"),
}


def require(package: str) -> None:
    """Skip the test if a framework is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"pip install {package}")


def attach_to_accelerator(rank: int, n: int) -> None:
    set_environment(rank, n)
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    forget_accelerate()
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    attached = ddp.attach(accelerator, "int8")
    with pytest.raises(RuntimeError, match="not wrapped in DDP yet"):
        attached.state  # noqa: B018
    model = accelerator.prepare(make_net())
    assert model.gradient_as_bucket_view
    accelerator.backward(model(torch.ones(1, 32)).sum())
    report = attached.state.report()
    assert report.steps == 1 and report.messages > 0
    with pytest.raises(TypeError, match="got Sequential"):
        ddp.attach(model.module)


def test_an_accelerator_keeps_its_own_options_of_ddp() -> None:
    require("accelerate")
    run_ranks(attach_to_accelerator, 2)


@pytest.mark.parametrize("framework", DDP_SESSIONS)
def test_a_run_that_was_killed_continues_with_the_same_losses(framework: str, tmp_path: Path) -> None:
    require(framework)
    session: Callable[..., Any]
    session, saved = DDP_SESSIONS[framework]
    with spawn_ranks(session, 2, tmp_path / "killed", KILLED) as ranks:
        ranks.receive(1)
        ranks.kill(1)
        survivor, dead = ranks.join(timeout=60)
    assert dead.exitcode == -9
    assert "PeerLost" in survivor.traceback

    states = tmp_path / "killed" / saved
    assert sorted(file.name for file in states.iterdir()) == ["rank0-of-2.pt", "rank1-of-2.pt"]
    whole = run_ranks(session, 2, tmp_path / "whole", WHOLE)
    resumed = run_ranks(session, 2, tmp_path / "killed", RESUMED)
    for (losses, _), (losses_of_resumed, warnings) in zip(whole, resumed):
        assert list(losses) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
        assert losses_of_resumed == {step: loss for step, loss in losses.items() if step > SAVED_AT}
        assert not warnings

    shutil.rmtree(states)
    without = run_ranks(session, 2, tmp_path / "killed", RESUMED)
    assert without[0][0] != resumed[0][0]
    assert len(without[0][1]) == 1 and not without[1][1]
    assert "rank0-of-2.pt is missing (and 1 more)" in without[0][1][0]
    assert "error feedback still had to send is lost" in without[0][1][0]


@pytest.mark.parametrize(
    ("session", "sent"),
    [
        (sessions.logged_by_trainer, ["gradients"]),
        (fsdp_sessions.logged_by_trainer, ["gradients", "parameters"]),
    ],
    ids=["ddp", "fsdp"],
)
def test_a_trainer_logs_the_metrics_at_its_interval(
    session: Callable[..., Any], sent: list[str], tmp_path: Path
) -> None:
    require("transformers")
    logged = run_ranks(session, 2, tmp_path)[0]
    assert [values["dtcomm/steps_total"] for values in logged] == [4, 8, 12]
    for values in logged:
        assert all(values[f"dtcomm/wire_bytes_total/{what}"] > 0 for what in sent)
        assert 8 <= sum(name.startswith("dtcomm/") for name in values) <= 14


def accelerator_and_model(rank: int, n: int, spec: str) -> tuple[Any, Any, Any]:
    set_environment(rank, n)
    from accelerate import Accelerator

    forget_accelerate()
    accelerator = Accelerator(cpu=True)
    attached = ddp.attach(accelerator, spec, feedback=True)
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
    require("accelerate")
    saved = run_ranks(save_after_two_steps, 2, tmp_path)
    loaded = run_ranks(load, 3, tmp_path, "int4", True)
    assert not torch.equal(saved[0], saved[1])
    torch.testing.assert_close(sum(loaded), sum(saved))


def test_another_spec_is_refused_unless_strict_is_off(tmp_path: Path) -> None:
    require("accelerate")
    saved = run_ranks(save_after_two_steps, 2, tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}/dtcomm: state: saved with codec=.*int4"):
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
    state = ddp.compress(model, "int4", feedback=True)
    dtcomm.frameworks.save_with(accelerator, state)
    loss_of(model, {name: value[None] for name, value in data()[rank].items()}).backward()
    saved = residuals_of(state)
    accelerator.save_state(str(folder))
    state.rescale(2.0)
    assert not torch.equal(residuals_of(state), saved)
    accelerator.load_state(str(folder))
    assert torch.equal(residuals_of(state), saved)


def test_a_state_that_the_program_made_itself_is_saved_too(tmp_path: Path) -> None:
    require("accelerate")
    run_ranks(save_and_load_own_state, 2, tmp_path)


@pytest.mark.parametrize("framework", FSDP_SESSIONS)
def test_fsdp2_trains_and_resumes(framework: str, tmp_path: Path) -> None:
    require(framework)
    session: Callable[..., Any]
    session, saved = FSDP_SESSIONS[framework]
    plain = run_ranks(session, 2, tmp_path / "plain", PLAIN, WHOLE)
    none = run_ranks(session, 2, tmp_path / "none", "none", WHOLE)
    assert none == plain
    whole = run_ranks(session, 2, tmp_path / "int8", "int8", WHOLE)
    assert whole != plain
    assert list(whole[0]) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert whole[0][EPOCHS * STEPS_PER_EPOCH] < 0.9 * whole[0][1]
    files = sorted(file.name for file in (tmp_path / "int8" / saved).iterdir())
    assert files == ["rank0-of-2.pt", "rank1-of-2.pt"]
    resumed = run_ranks(session, 2, tmp_path / "int8", "int8", RESUMED)
    for losses, losses_of_resumed in zip(whole, resumed):
        assert losses_of_resumed == {step: loss for step, loss in losses.items() if step > SAVED_AT}


def refuse_local_sgd(rank: int, world_size: int) -> None:
    with pytest.raises(TypeError, match=r"trainer: expected a transformers\.Trainer, got Linear"):
        local_sgd.attach(nn.Linear(2, 2), local_sgd.LocalSGD)


def test_local_sgd_in_a_trainer_and_resumed_with_an_average_in_flight(tmp_path: Path) -> None:
    require("transformers")
    run_ranks(refuse_local_sgd, 1)
    whole = run_ranks(sessions.local_sgd_session, 2, tmp_path / "run", WHOLE, timeout=600)
    assert torch.equal(whole[0][1], whole[1][1])
    # Every fragment four times in 12 steps, and all of them at the end.
    assert whole[0][2] == 9 and whole[0][0] != whole[1][0]
    assert whole[0][0][EPOCHS * STEPS_PER_EPOCH] < 0.95 * whole[0][0][1]
    resumed = run_ranks(sessions.local_sgd_session, 2, tmp_path / "run", RESUMED, timeout=600)
    for (losses, weights, _, _), (later, again, _, lines) in zip(whole, resumed):
        assert lines == []
        assert later == {step: loss for step, loss in losses.items() if step > SAVED_AT}
        assert torch.equal(weights, again)
