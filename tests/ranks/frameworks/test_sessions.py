"""Trainer, Accelerate and Lightning train with the hook; their checkpoints hold the state of compression."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtcomm.launch.ranks import run_ranks, spawn_ranks
from tests.ranks.frameworks import sessions
from tests.ranks.frameworks.sessions import EPOCHS, KILLED, RESUMED, SAVED_AT, STEPS_PER_EPOCH, WHOLE

SESSIONS = {
    "accelerate": (sessions.accelerate_session, "step-4/dtcomm"),
    "transformers": (sessions.trainer_session, "checkpoint-4/dtcomm"),
    "lightning": (sessions.lightning_session, "dtcomm/epoch=0.ckpt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", SESSIONS)
def test_a_run_that_was_killed_continues_with_the_same_losses(framework: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"pip install {framework}")
    session: Callable[..., Any]
    session, saved = SESSIONS[framework]
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
