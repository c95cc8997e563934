"""State from step to step: residuals in fewer bytes, references, velocities, and changes of world size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtcomm.compress.error_state import FEEDBACKS, ErrorState
from dtcomm.compress.residuals import FORMS, Residuals, expand_saved
from dtcomm.compress.spec import parse_scheme
from tests.support.simulated_ranks import SimulatedRanks

SHAPE = (64, 64)
LAYER = [("layer", torch.zeros(SHAPE))]
#: The largest rounding error of a stored residual, relative to the largest element of its block.
ROUNDING = {"fp32": 1e-6, "bf16": 2**-8, "int8": 1 / 100}


def gradients(ranks: int, step: int, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [[torch.randn(SHAPE, generator=generator).to(dtype)] for _ in range(ranks)]


def saved_states(run: SimulatedRanks) -> list[dict[str, Any]]:
    """Return the checkpoint of every rank."""
    states = []
    for rank, error_state in enumerate(run.error_states):
        own = {"version": 1, "rank": rank, "world_size": len(run.error_states)}
        states.append({**own, **error_state.state_dict()})
    return states


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spec", ["int4", "topk:ratio=0.05", "powersgd:rank=2"])
def test_mass_is_conserved_to_the_rounding_of_stored_residuals(spec: str, form: str) -> None:
    run = SimulatedRanks(spec, 2, LAYER, feedback=True, residual=form)
    old = torch.zeros(SHAPE, dtype=torch.float64)
    for step in range(6):
        inputs = gradients(2, step)
        (result,) = run.average(inputs)
        new = sum(
            expand_saved(state["residuals"])["layer"].double().view(SHAPE) for state in saved_states(run)
        )
        into = sum(of_rank[0].double() for of_rank in inputs) + old
        assert isinstance(new, torch.Tensor)
        gap = (into - 2 * result.double() - new).abs().max()
        assert gap <= 4 * ROUNDING[form] * new.abs().max()
        old = new


@pytest.mark.parametrize(("form", "max_bytes_per_element"), [("fp32", 4.0), ("bf16", 2.01), ("int8", 1.1)])
def test_the_memory_of_residuals_is_reported(form: str, max_bytes_per_element: float) -> None:
    run = SimulatedRanks("int4", 2, LAYER, feedback=True, residual=form)
    run.average(gradients(2, 0))
    numel = SHAPE[0] * SHAPE[1]
    error_state = run.error_states[0]
    assert error_state.persistent_bytes() <= max_bytes_per_element * numel
    assert error_state.nbytes()[f"residuals in {form}"] == error_state.persistent_bytes()
    assert error_state.nbytes().get("fp32 within a step", 0) == (0 if form == "fp32" else 4 * numel)


def test_small_errors_accumulate_in_int8_residuals() -> None:
    """In a block with a residual of 100 (so in steps of 0.8), 0.01 added a thousand times gives 10 within rounding."""
    residuals = Residuals("int8")
    like = torch.zeros(1024)
    for step in range(1000):
        lost = torch.full((1024,), 0.01)
        lost[::32] = 100.0 if step == 0 else 0.0
        residuals.add("w", lost, key=step)
    total = residuals.get("w", like).view(-1, 32)
    torch.testing.assert_close(total[:, 0], torch.full((32,), 100.0), rtol=0.05, atol=0)
    assert float(total[:, 1:].mean()) == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_loaded_state_continues_bit_for_bit_in_every_form(form: str) -> None:
    whole = SimulatedRanks("int4", 2, LAYER, feedback=True, residual=form)
    for step in range(3):
        whole.average(gradients(2, step))
    resumed = SimulatedRanks("int4", 2, LAYER, feedback=True, residual=form)
    for rank, (error_state, state) in enumerate(zip(resumed.error_states, saved_states(whole), strict=True)):
        error_state.load(state, expand_saved(state["residuals"]), rank, 2)
    resumed.steps = 3
    for step in range(3, 6):
        assert torch.equal(whole.average(gradients(2, step))[0], resumed.average(gradients(2, step))[0])


@pytest.mark.parametrize("feedback", ["ef21", "diana"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shared_reference_is_the_mean_of_all(feedback: str, dtype: torch.dtype) -> None:
    run = SimulatedRanks("int3", 3, [("layer", torch.zeros(SHAPE, dtype=dtype))], feedback=feedback)
    for step in range(30):
        run.average(gradients(3, step, dtype))
    states = [state["references"] for state in saved_states(run)]
    mean = torch.stack([state["local"]["layer"] for state in states]).mean(0)
    for state in states:
        torch.testing.assert_close(state["shared"]["layer"], mean, rtol=0, atol=1e-5)
    assert mean.abs().max() > 0.1


@pytest.mark.parametrize("spec", ["int2", "topk:ratio=0.05", "powersgd:rank=1"])
def test_errors_vanish_under_a_constant_gradient(spec: str) -> None:
    """EF21's errors shrink with the differences."""
    run = SimulatedRanks(spec, 2, LAYER, feedback="ef21")
    inputs = gradients(2, 0)
    mean = torch.stack([of_rank[0] for of_rank in inputs]).mean(0)
    errors = [float((run.average(inputs)[0] - mean).norm() / mean.norm()) for _ in range(60)]
    assert errors[0] > 0.3
    assert errors[-1] < 0.15


@pytest.mark.parametrize("feedback", FEEDBACKS)
@pytest.mark.parametrize("spec", ["int8", "topk", "powersgd:rank=2"])
def test_a_nan_of_one_rank_affects_all_ranks_for_one_step(spec: str, feedback: str) -> None:
    run = SimulatedRanks(spec, 2, LAYER, feedback=feedback)
    run.average(gradients(2, 0))
    bad = gradients(2, 1)
    bad[1][0][3, 5] = float("nan")
    assert not run.average(bad)[0].isfinite().all()
    for step in range(2, 4):
        assert run.average(gradients(2, step))[0].isfinite().all()


def test_dgc_keeps_no_nan() -> None:
    run = SimulatedRanks("dgc:ratio=0.01", 2, LAYER)
    run.average(gradients(2, 0))
    bad = gradients(2, 1)
    bad[1][0][3, 5] = float("inf")
    assert not run.average(bad)[0].isfinite().all()
    assert run.average(gradients(2, 2))[0].isfinite().all()
    assert all(
        error_state.state_dict()["velocities"]["layer"].isfinite().all() for error_state in run.error_states
    )


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize(("spec", "feedback"), [("int4", "ef21"), ("dgc:ratio=0.01", True)])
def test_means_survive_a_change_of_world_size(spec: str, feedback: bool | str, after: int) -> None:
    run = SimulatedRanks(spec, 3, LAYER, feedback=feedback)
    for step in range(4):
        run.average(gradients(3, step))
    states = saved_states(run)
    resumed = SimulatedRanks(spec, after, LAYER, feedback=feedback)
    for rank, error_state in enumerate(resumed.error_states):
        error_state.load(states, {}, rank, after)
    new = saved_states(resumed)
    if feedback == "ef21":
        for state in new:
            assert torch.equal(
                state["references"]["shared"]["layer"], states[0]["references"]["shared"]["layer"]
            )
            assert torch.equal(
                state["references"]["local"]["layer"], states[0]["references"]["shared"]["layer"]
            )
    else:
        before = torch.stack([state["velocities"]["layer"] for state in states]).mean(0)
        for state in new:
            torch.testing.assert_close(state["velocities"]["layer"], before)
    assert resumed.average(gradients(after, 9))[0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feedback": "ef22"}, "feedback: 'ef22'; valid: True, False, 'auto', 'residual', 'ef21', 'diana'"),
        (
            {"feedback": False, "form": "bf16", "schemes": [parse_scheme("int8")]},
            "residual: 'bf16' is for error feedback, which is off; valid: 'fp32', or feedback=True",
        ),
        ({"form": "fp64"}, "residual: 'fp64'; valid: fp32, bf16, int8"),
        ({"feedback": False, "schemes": [parse_scheme("dgc")]}, "does not go with dgc"),
        (
            {"schemes": [parse_scheme("dgc:momentum=0.5"), parse_scheme("dgc:momentum=0.9")]},
            r"momenta \[0.5, 0.9\]",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ErrorState(**options)
