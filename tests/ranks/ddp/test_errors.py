"""An error of a collective reaches the caller of backward with its own type, and training cannot continue after it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from dtcomm import ddp
from dtcomm.compress.checkpoint import seal
from dtcomm.errors import PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from tests.support.stopwatch import Stopwatch
from tests.unit.ddp.models import SMALL_BUCKETS, backward, wrapped


def train_with_misfit_residual(rank: int, world_size: int, options: dict[str, Any]) -> tuple[str, str, str]:
    """Return the errors of two backward passes and of the state, with a residual of the wrong size on every rank."""
    model = wrapped(**options)
    state = ddp.DDPState("int8", feedback=True)
    model.register_comm_hook(state, ddp.hook)
    good = state.state_dict()
    # A bare state cannot check names and sizes before it has seen the parameters.
    names = [f"parameter.{number}" for number in range(7)]
    state.load_state_dict(seal({**good, "residuals": {name: torch.zeros(5) for name in names}}))
    messages = []
    for step in range(2):
        with pytest.raises(ValueError) as error:
            backward(model, rank, step)
        messages.append(str(error.value))
    return messages[0], messages[1], str(state.error)


@pytest.mark.parametrize(
    "options", [{}, SMALL_BUCKETS, {"find_unused_parameters": True}, {"static_graph": True}]
)
def test_an_error_of_the_hook_keeps_its_type_and_is_raised_again(options: dict[str, Any]) -> None:
    for first, second, stored in run_ranks(train_with_misfit_residual, 2, options):
        assert "has 5 elements, its gradient 2304" in first
        assert first == second == stored


def refuse_forward(rank: int, world_size: int) -> str:
    model = wrapped()
    state = ddp.compress(model, "int8")
    state._reducer.error = PeerLost("rank 5 is gone")
    with pytest.raises(PeerLost) as error:
        model(torch.zeros(1, 48))
    return str(error.value)


def test_model_refuses_to_train_after_an_error() -> None:
    assert run_ranks(refuse_forward, 2) == ["rank 5 is gone"] * 2


def train_until_failure(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Train until an error; send its type, its text, how long it took, and the error of the next step."""
    model = wrapped(**options)
    state = ddp.compress(model, "int8")
    for step in range(100_000):
        watch = Stopwatch()
        try:
            backward(model, rank, step)
        except Exception as error:
            elapsed = watch.elapsed()
            if state.error is None and "find_unused_parameters" in options:
                # The all-reduce in which torch counts the parameters that were used has failed before the hook.
                send_to_parent((type(error).__name__, str(error), elapsed, ""))
                os._exit(0)  # so that the ranks that wait for this one see that it has ended
            assert state.error is error
            with pytest.raises(type(error)) as again:
                backward(model, rank, step)
            send_to_parent((type(error).__name__, str(error), elapsed, str(again.value)))
            return
        if step == 3:
            send_to_parent("running")
    raise AssertionError("nothing happened")


@pytest.mark.parametrize("options", [{}, SMALL_BUCKETS, {"find_unused_parameters": True}])
def test_a_killed_peer_is_named_by_backward_within_two_seconds(options: dict[str, Any]) -> None:
    with spawn_ranks(train_until_failure, 3, options) as ranks:
        for rank in range(3):
            assert ranks.receive(rank, 60) == "running"
        pid = ranks.pids[1]
        ranks.kill(1)
        outcomes = [ranks.receive(rank, 20) for rank in (0, 2)]
    for name, text, elapsed, again in outcomes:
        assert elapsed.within(cpu_s=2.0, wall_s=10.0), elapsed
        if name == "RuntimeError" and not again:
            assert "gloo" in text.lower(), text
            continue
        assert name == "PeerLost", text
        assert "rank 1" in text
        assert str(pid) in text
        assert again == text
