"""The choices of `compress(model, "auto")` in simulated runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.compress.policy import exclusions
from dtcomm.ddp import auto
from dtcomm.ddp.auto import NONE, Trials, Tuner, parse_candidates
from tests.support.autotune_simulation import AlikeRanks, Noise, simulate

SLOWER = {"plain": 1.0, "none": 1.02, "fp8_e4m3": 1.04, "int8": 1.02, "mxfp8": 1.08}
NOISES = {
    "independent 10 %": Noise(0.1),
    "independent 20 %": Noise(0.2),
    "drift": Noise(0.1, drift=0.05),
    "bursts": Noise(0.2, burst=0.03),
}
GRADIENT = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))


def run_until_settled(tuner: Tuner, first: int) -> int:
    """Run steps that take as long as their payloads; return the number of the first step with a choice."""
    for step in range(first, first + 400):
        tuner.begin_step(step)
        chosen = tuner.choose("weight", GRADIENT).codec
        if tuner.settled:
            return step
        sent: int = chosen.wire_bytes(GRADIENT.numel())  # type: ignore[union-attr]
        tuner.end_step(step, 1e-7 * sent + 1e-3 * tuner.bypass)
    raise AssertionError("no choice after 400 steps")


@pytest.mark.parametrize("name", NOISES)
def test_a_plan_that_is_slower_is_not_chosen(name: str) -> None:
    """At most 1 % of runs may; of 120, more than 5 would have a probability of 0.1 %."""
    runs = [simulate(SLOWER, NOISES[name], seed, steps=600) for seed in range(120)]
    assert sum(run.choice not in ("", "plain DDP") for run in runs) <= 5


@pytest.mark.parametrize("name", NOISES)
def test_a_plan_that_is_much_faster_is_chosen_within_150_steps(name: str) -> None:
    seconds = {"plain": 1.0, "none": 1.0, "fp8_e4m3": 0.8, "int8": 0.5, "mxfp8": 0.8}
    runs = [simulate(seconds, NOISES[name], seed, steps=200) for seed in range(30)]
    assert sum(run.choice == "int8" for run in runs) >= 28
    assert max(run.steps for run in runs) < 150


def test_one_slow_step_does_not_decide_the_selection() -> None:
    """The step is the second in which the selection tries the faster codec."""
    seconds = {"plain": 1.0, "none": 1.0, "fp8_e4m3": 0.8, "int8": 0.7}
    undisturbed = simulate(seconds, Noise(0.0), 0)
    second = [step for step, name in enumerate(undisturbed.used) if name == "int8"][1]
    assert simulate(seconds, Noise(0.0), 0, slow_steps={"int8": [second]}, slow_factor=5).choice == "int8"


def test_of_plans_that_are_equally_fast_the_one_with_the_least_error_is_chosen() -> None:
    seconds = {"plain": 1.0, "none": 1.0, "int8": 0.50, "int8:block=1024": 0.505}
    assert simulate(seconds, Noise(0.0), 0).choice == "int8"
    # Of 8-bit codes, int8 has less error than fp8_e4m3.
    assert simulate({**seconds, "fp8_e4m3": 0.499}, Noise(0.0), 0).choice == "int8"


def test_a_lossy_plan_has_to_be_three_percent_faster() -> None:
    for seconds, choice in ((0.98, "plain DDP"), (0.96, "int8")):
        run = simulate({"plain": 1.0, "none": 1.0, "int8": seconds}, Noise(0.0), 0)
        assert run.choice == choice
        assert ("without `compress` steps are shorter still" in run.reason) == (choice == "plain DDP")
    run = simulate({"plain": 1.0, "none": 0.98, "int8": 1.0}, Noise(0.0), 0)
    assert run.choice == "none"  # nothing is lost


@pytest.mark.parametrize(
    ("device", "buckets", "choice"), [("cuda", 2, "int8"), ("cuda", 40, "plain DDP"), ("cpu", 40, "int8")]
)
def test_codecs_whose_launches_take_as_long_as_a_step_of_plain_ddp_are_not_tried(
    device: str, buckets: int, choice: str
) -> None:
    """The host takes 75 us or more for the kernels and calls of a bucket; a step of plain DDP takes 2 ms."""
    tuner = Tuner(["int8"], AlikeRanks())
    tuner.set_device(torch.device(device))
    step = 0
    while not tuner.settled:
        tuner.begin_step(step)
        tuner.buckets = buckets
        tuner.end_step(step, 2e-3 if tuner.plan.lossless else 1e-3)
        step += 1
    assert [decision.action for decision in tuner.decisions] == [choice]
    assert ("the host takes" in tuner.decisions[0].reason) == (device == "cuda")
    assert step < 20 or choice == "int8"


def test_a_choice_is_made_once_and_again_after_retune(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial takes half of the risk that is left: a run accepts a slower plan with 1 % at most."""
    risks: list[float] = []

    def record(*args: Any, risk: float, **options: Any) -> Trials:
        risks.append(risk)
        return Trials(*args, risk=risk, **options)

    monkeypatch.setattr(auto, "Trials", record)
    tuner = Tuner(None, AlikeRanks())
    settled = run_until_settled(tuner, 0)
    for step in range(settled, settled + 1000):
        tuner.begin_step(step)
        tuner.end_step(step, 9.0)
    assert [decision.action for decision in tuner.decisions] == ["int4"]
    assert "int4 was faster than plain DDP in 12 of 12 pairs of steps" in str(tuner.decisions[0])
    plans = [row["plan"] for row in tuner.rows]
    assert plans == ["none", "bf16:round=stochastic", "int8", "int4", "plain DDP"]
    tuner.retune()
    assert not tuner.settled and tuner.choose("weight", GRADIENT).codec == NONE
    run_until_settled(tuner, settled + 1000)
    assert [decision.action for decision in tuner.decisions] == ["int4", "int4"]
    assert risks[0] == 0.005 and all(later == earlier / 2 for earlier, later in pairwise(risks))


def test_a_choice_is_saved_in_the_state() -> None:
    tuner = Tuner(None, AlikeRanks())
    assert tuner.state_dict() == {}
    run_until_settled(tuner, 0)
    resumed = Tuner(None, AlikeRanks())
    resumed.load_state_dict(tuner.state_dict())
    assert resumed.settled and resumed.choose("weight", GRADIENT).codec == codec("int4")
    resumed.begin_step(100)
    assert resumed.settled and resumed.decisions == []
    resumed.load_state_dict({})  # of a run that had not chosen yet
    assert not resumed.settled


def test_excluded_parameters_stay_uncompressed_whatever_is_chosen() -> None:
    tuner = Tuner(None, AlikeRanks(), exclusions("head"))
    for step in range(400):
        tuner.begin_step(step)
        chosen = tuner.choose("weight", GRADIENT).codec
        assert tuner.choose("head.weight", GRADIENT).codec == NONE
        tuner.end_step(step, float(chosen.wire_bytes(GRADIENT.numel())))  # type: ignore[union-attr]
    assert tuner.decisions[0].action == "int4" and chosen == codec("int4")


@pytest.mark.parametrize("candidates", ["int8", [], ["dgc"]])
def test_invalid_candidates_are_named(candidates: Any) -> None:
    with pytest.raises(ValueError, match="candidates"):
        parse_candidates(candidates)
