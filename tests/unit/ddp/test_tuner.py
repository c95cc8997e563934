"""The choices of `compress(model, "auto")` over many steps, with links and step times that change."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.compress.autotune_model import NONE, AutoConfig
from dtcomm.compress.policy import exclusions
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.ddp.autotune import measure
from dtcomm.ddp.autotune import tuner as tuner_module
from dtcomm.ddp.autotune.measure import BucketTiming
from dtcomm.ddp.autotune.trials import Trials
from dtcomm.ddp.autotune.tuner import Tuner
from tests.support.autotune_simulation import Link, Noise, fixed_kernel_seconds, simulate


@pytest.fixture(autouse=True)
def kernels_of_known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "kernel_seconds", fixed_kernel_seconds)


def run_steps(tuner: Tuner, link: Link, steps: range) -> None:
    """Run steps of one bucket with one matrix, which take as long as the link needs for the payload."""
    gradient = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    for step in steps:
        tuner.begin_step(step)
        if tuner.needs_sample(step):
            tuner.sample_bucket(0, ["weight"], [gradient])
        chosen = tuner.choose("weight", gradient).codec
        assert not isinstance(chosen, PowerSGD)
        sent = chosen.wire_bytes(gradient.numel())  # type: ignore[union-attr]
        seconds = link.seconds(sent) + 1e-4 * (chosen != NONE) + 1e-3 * tuner.bypass
        tuner.end_step(step, seconds, [BucketTiming(0.0, seconds, sent)])


def test_a_link_that_becomes_fast_ends_compression_and_one_that_becomes_slow_brings_it_back() -> None:
    link = Link(0.05)
    tuner = Tuner(AutoConfig(every=20), link)
    run_steps(tuner, link, range(100))
    assert [decision.action for decision in tuner.decisions] == ["int4"]
    assert [row["plan"] for row in tuner.rows[-2:]] == ["none", "plain DDP"]
    assert "int4 was faster than plain DDP in 12 of 12 pairs of steps" in str(tuner.decisions[0])
    link.gbit = 400
    run_steps(tuner, link, range(100, 400))
    assert [decision.action for decision in tuner.decisions[1:]] == ["measure again", "none"]
    assert "the link is" in tuner.decisions[1].reason and tuner.pop_uncompressed() == ["weight"]
    link.gbit = 0.05
    run_steps(tuner, link, range(400, 700))
    assert [decision.action for decision in tuner.decisions[3:]] == ["measure again", "int4"]


SLOWER = {"plain": 1.0, "none": 1.02, "fp8_e4m3": 1.04, "int8": 1.02, "mxfp8": 1.08}
NOISES = {
    "independent 10 %": Noise(0.1),
    "independent 20 %": Noise(0.2),
    "drift": Noise(0.1, drift=0.05),
    "bursts": Noise(0.2, burst=0.03),
}


@pytest.mark.parametrize("name", NOISES)
def test_a_plan_that_is_slower_is_not_chosen(name: str) -> None:
    """At most 1 % of runs may; of 120, more than 5 would have a probability of 0.1 %."""
    runs = [simulate(SLOWER, NOISES[name], seed, steps=600) for seed in range(120)]
    assert all("plain DDP" in run.decisions for run in runs)
    assert sum(not {*run.decisions} <= {"plain DDP", "measure again"} for run in runs) <= 5


@pytest.mark.parametrize("name", NOISES)
def test_a_plan_that_is_much_faster_is_chosen_within_150_steps(name: str) -> None:
    seconds = {"plain": 1.0, "none": 1.0, "fp8_e4m3": 0.8, "int8": 0.5, "mxfp8": 0.8}
    runs = [simulate(seconds, NOISES[name], seed, steps=200) for seed in range(30)]
    assert sum(run.choice == "int8" for run in runs) >= 28
    assert max(run.steps for run in runs) < 150


def test_one_slow_step_does_not_decide_the_selection() -> None:
    """The step is the second in which the selection tries the faster codec."""
    seconds = {"plain": 1.0, "none": 1.0, "fp8_e4m3": 0.8, "int8": 0.7}
    undisturbed = simulate(seconds, Noise(0.0), 0, steps=200)
    second = [step for step, name in enumerate(undisturbed.used) if name == "int8"][1]
    assert (
        simulate(seconds, Noise(0.0), 0, steps=200, slow_steps={"int8": [second]}, slow_factor=5).choice
        == "int8"
    )


def test_of_plans_that_are_equally_fast_the_one_with_the_least_error_is_chosen() -> None:
    seconds = {"plain": 1.0, "none": 1.0, "int8": 0.50, "int8:block=1024": 0.505}
    assert simulate(seconds, Noise(0.0), 0, steps=200).choice == "int8"
    # Of 8-bit codes, int8 has less error than fp8_e4m3.
    assert simulate({**seconds, "fp8_e4m3": 0.499}, Noise(0.0), 0, steps=200).choice == "int8"


def test_a_lossy_plan_has_to_be_three_percent_faster() -> None:
    for seconds, choice in ((0.98, "plain DDP"), (0.96, "int8")):
        run = simulate({"plain": 1.0, "none": 1.0, "int8": seconds}, Noise(0.0), 0, steps=200)
        assert run.choice == choice
        assert ("without `compress` steps are shorter still" in run.reasons[-1]) == (choice == "plain DDP")
    run = simulate({"plain": 1.0, "none": 0.98, "int8": 1.0}, Noise(0.0), 0, steps=200)
    assert run.choice == "none"  # nothing is lost


def test_plain_ddp_is_tried_again_beside_a_choice_that_is_not_much_faster() -> None:
    """int8 is 10 % faster while it is tried, and then as slow as if the network had changed for large messages only."""
    seconds = {"plain": 1.0, "none": 1.0, "int8": 0.9}
    slow = {"int8": range(150, 10_000)}
    run = simulate(seconds, Noise(0.01), 0, steps=600, every=100, slow_steps=slow, slow_factor=1.2)
    assert run.decisions == ["int8", "measure again", "plain DDP"] and run.choice == "plain DDP"
    kept = simulate(seconds, Noise(0.01), 0, steps=600, every=100)
    assert kept.decisions == ["int8"] and kept.choice == "int8"
    assert "plain" in kept.used[200:]
    # A choice that was much faster is not tried again: that would cost more than it could gain.
    fast = simulate({**seconds, "int8": 0.5}, Noise(0.01), 0, steps=600, every=100)
    assert "plain" not in fast.used[150:]


def test_every_trial_takes_half_of_the_risk_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run accepts a slower plan with a probability of 1 % at most, however often it decides."""
    risks: list[float] = []

    def record(*args: Any, risk: float, **options: Any) -> Trials:
        risks.append(risk)
        return Trials(*args, risk=risk, **options)

    monkeypatch.setattr(tuner_module, "Trials", record)
    link = Link(0.05)
    tuner = Tuner(AutoConfig(every=20), link)
    for number in range(6):
        link.gbit = 400 if number % 2 else 0.05
        run_steps(tuner, link, range(100 * number, 100 * number + 100))
    assert len(risks) >= 6 and risks[0] == 0.005 and sum(risks) < 0.01
    assert all(later == earlier / 2 for earlier, later in pairwise(risks))


def test_a_settled_choice_is_kept_and_saved_in_the_state() -> None:
    link = Link(0.05)
    tuner = Tuner(AutoConfig(every=10), link)
    assert tuner.state_dict() == {}
    run_steps(tuner, link, range(100))
    assert len(tuner.decisions) == 1 and tuner.settled
    resumed = Tuner(AutoConfig(every=10), link)
    resumed.load_state_dict(tuner.state_dict())
    assert resumed.settled and resumed.choose("weight", torch.empty(512, 512)).codec == codec("int4")
    run_steps(resumed, link, range(100, 130))
    assert resumed.decisions == []


def test_the_choice_keeps_to_the_budget_and_says_what_exceeds_it() -> None:
    link = Link(0.05)
    tuner = Tuner(AutoConfig(budget=0.05), link)
    run_steps(tuner, link, range(100))
    assert tuner.decisions[0].action == "int8" and "over the budget: int4" in str(tuner.decisions[0])


def test_excluded_parameters_stay_uncompressed_whatever_is_chosen() -> None:
    link, gradient = Link(0.05), torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    tuner = Tuner(AutoConfig(), link, exclusions("head"))
    for step in range(100):
        tuner.begin_step(step)
        if tuner.needs_sample(step):
            tuner.sample_bucket(0, ["weight", "head.weight"], [gradient, gradient])
        chosen = tuner.choose("weight", gradient).codec
        assert tuner.choose("head.weight", gradient).codec == NONE
        seconds = link.seconds(chosen.wire_bytes(gradient.numel()))  # type: ignore[union-attr]
        tuner.end_step(step, seconds, [BucketTiming(0.0, seconds, 10**6)])
    assert tuner.decisions[0].action == "int4" and chosen == codec("int4")
