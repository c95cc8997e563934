"""A compressor with state of the user's own: it gives what the built-in one with the same rule gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dtcomm
from dtcomm.compress.error_state import ErrorState
from dtcomm.compress.feedback import Feedback
from tests.support.simulated_ranks import SimulatedRanks

State = dict[str, torch.Tensor]


class EF21(Feedback):
    """The rule of feedback="ef21"."""

    def send(self, gradient: torch.Tensor, own: State, shared: Mapping[str, torch.Tensor]) -> torch.Tensor:
        difference = gradient - own["estimate"] if own else gradient
        own["estimate"] = gradient
        return difference

    def keep(self, lost: torch.Tensor, own: State) -> None:
        own["estimate"] = own["estimate"] - lost

    def receive(self, mean: torch.Tensor, shared: State) -> torch.Tensor:
        shared["estimate"] = shared["estimate"] + mean if shared else mean
        return shared["estimate"]


class ErrorFeedback(Feedback):
    """The rule of feedback=True."""

    def send(self, gradient: torch.Tensor, own: State, shared: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return gradient + own["residual"] if own else gradient

    def keep(self, lost: torch.Tensor, own: State) -> None:
        own["residual"] = lost

    def receive(self, mean: torch.Tensor, shared: State) -> torch.Tensor:
        return mean


class Momentum(ErrorFeedback):
    """Error feedback, and momentum on the mean."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum

    def receive(self, mean: torch.Tensor, shared: State) -> torch.Tensor:
        velocity = shared.setdefault("velocity", torch.zeros_like(mean))
        return velocity.mul_(self.momentum).add_(mean)


PARAMETERS = [("weight", torch.zeros(64, 40)), ("bias", torch.zeros(40)), ("other", torch.zeros(32, 50))]


def gradients(ranks: int, step: int, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        [torch.randn(p.shape, generator=generator).to(dtype) for _, p in PARAMETERS] for _ in range(ranks)
    ]


@settings(deadline=None, max_examples=25)
@given(
    spec=st.sampled_from(["int4", "sign", "topk:ratio=0.05", "int8:round=stochastic"]),
    ranks=st.integers(1, 4),
    pair=st.sampled_from([("ef21", EF21()), (True, ErrorFeedback())]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_rules_of_built_in_feedback_give_its_bits(
    spec: str, ranks: int, pair: tuple[bool | str, Feedback], dtype: torch.dtype
) -> None:
    built_in, own = pair
    if built_in is True and dtype != torch.float32:
        built_in, own = "ef21", EF21()  # residuals are added to 16-bit gradients before they are sent
    runs = []
    for feedback in (built_in, own):
        run = SimulatedRanks(spec, ranks, PARAMETERS, feedback=feedback)
        runs.append([run.average(gradients(ranks, step, dtype)) for step in range(4)])
    for theirs, ours in zip(*runs, strict=True):
        assert all(map(torch.equal, theirs, ours))


def run_of(feedback: Any, ranks: int = 2) -> SimulatedRanks:
    return SimulatedRanks("int4", ranks, PARAMETERS, feedback=feedback)


def load(run: SimulatedRanks, states: list[dict[str, Any]]) -> None:
    ranks = len(run.error_states)
    for rank, error_state in enumerate(run.error_states):
        error_state.load(states, {}, rank, ranks)


def saved(run: SimulatedRanks) -> list[dict[str, Any]]:
    return [{**state.state_dict(), "world_size": len(run.error_states)} for state in run.error_states]


def test_state_is_saved_and_continues() -> None:
    run = run_of(Momentum(0.9))
    for step in range(3):
        run.average(gradients(2, step))
    states = saved(run)
    assert set(states[0]["references"]["local"]) == {"weight/residual", "other/residual"}
    assert set(states[0]["references"]["shared"]) == {"weight/velocity", "other/velocity"}
    assert run.error_states[0].nbytes() == {"references": 2 * 4 * (64 * 40 + 32 * 50)}
    again = run_of(Momentum(0.9))
    load(again, states)
    again.steps = run.steps
    for step in range(3, 6):
        assert all(map(torch.equal, run.average(gradients(2, step)), again.average(gradients(2, step))))


def test_another_number_of_ranks_starts_with_the_mean() -> None:
    run = run_of(Momentum(0.9))
    run.average(gradients(2, 0))
    states = saved(run)
    more = run_of(Momentum(0.9), ranks=3)
    load(more, states)
    local = [state["references"]["local"]["weight/residual"] for state in states]
    for state in saved(more):
        assert torch.equal(state["references"]["local"]["weight/residual"], (local[0] + local[1]) / 2)
        assert torch.equal(
            state["references"]["shared"]["weight/velocity"],
            states[0]["references"]["shared"]["weight/velocity"],
        )


def test_a_step_with_nan_leaves_no_trace() -> None:
    run = run_of(Momentum(0.9))
    run.average(gradients(2, 0))
    bad = gradients(2, 1)
    bad[1][0][3, 3] = torch.nan
    assert run.average(bad)[0].isnan().any()
    assert all(tensor.isfinite().all() for tensor in run.average(gradients(2, 2)))


def test_scale_and_reset() -> None:
    run = run_of(EF21())
    run.average(gradients(2, 0))
    state = run.error_states[0]
    before = state.state_dict()["references"]
    state.scale(4.0)
    after = state.state_dict()["references"]
    for side in ("local", "shared"):
        assert all(torch.equal(after[side][name], 4 * tensor) for name, tensor in before[side].items())
    state.reset("weight")
    assert set(state.state_dict()["references"]["local"]) == {"other/estimate"}


class Wrong(ErrorFeedback):
    """Returns what it should not."""

    def __init__(self, **returns: Any) -> None:
        self.returns = returns

    def send(self, gradient: torch.Tensor, own: State, shared: Mapping[str, torch.Tensor]) -> Any:
        own.update(self.returns.get("own", {}))
        return self.returns.get("send", gradient)

    def receive(self, mean: torch.Tensor, shared: State) -> Any:
        shared.update(self.returns.get("shared", {}))
        return self.returns.get("receive", mean)

    def __str__(self) -> str:
        return "Wrong"


@pytest.mark.parametrize(
    ("returns", "kind", "message"),
    [
        ({"send": None}, TypeError, "send of Wrong returned NoneType; expected a float32 tensor"),
        ({"send": torch.zeros(3)}, ValueError, r"send of Wrong returned shape \(3,\) on cpu; expected"),
        ({"receive": torch.zeros(2560).half()}, TypeError, "receive of Wrong returned torch.float16"),
        ({"own": {"a/b": torch.zeros(3)}}, ValueError, "own of Wrong has the key 'a/b'; expected a str"),
        ({"own": {"a": 3}}, TypeError, r"own\['a'\] of Wrong for weight is int; expected a float32"),
        ({"shared": {"a": torch.ones(3).int()}}, TypeError, r"shared\['a'\] of Wrong for weight is torch"),
    ],
)
def test_wrong_results_are_refused(returns: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^feedback: {message}"):
        run_of(Wrong(**returns)).average(gradients(2, 0))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"feedback: .*EF21 object.* does not go with dgc"):
        ErrorState(EF21(), schemes=[dtcomm.compress.feedback.DGC()])
    with pytest.raises(ValueError, match="valid: True"):
        ErrorState(EF21)  # type: ignore[arg-type]
    assert str(Momentum(0.9)) == "Momentum(momentum=0.9)" and str(EF21()) == "EF21()"
