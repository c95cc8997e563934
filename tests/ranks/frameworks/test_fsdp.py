"""FSDP2 in Accelerate, Trainer and Lightning: same losses with codec none, training and resuming with int8."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtcomm.launch.ranks import run_ranks
from tests.ranks.frameworks import fsdp_sessions
from tests.ranks.frameworks.fsdp_sessions import PLAIN
from tests.ranks.frameworks.sessions import EPOCHS, RESUMED, SAVED_AT, STEPS_PER_EPOCH, WHOLE

SESSIONS = {
    "accelerate": (fsdp_sessions.accelerate_session, "step-4/dtcomm"),
    "transformers": (fsdp_sessions.trainer_session, "checkpoint-4/dtcomm"),
    "lightning": (fsdp_sessions.lightning_session, "epoch=0.ckpt/dtcomm"),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", SESSIONS)
def test_fsdp2_trains_and_resumes(framework: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"pip install {framework}")
    session: Callable[..., Any]
    session, saved = SESSIONS[framework]
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
