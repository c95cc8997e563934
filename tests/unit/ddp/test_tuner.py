"""The choices of `compress(model, "auto")` over many steps, with links and step times that change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.codecs import codec
from dtcomm.compress.autotune_model import NONE, AutoConfig
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.ddp.autotune.measure import BucketTiming
from dtcomm.ddp.autotune.tuner import COUNTED, Tuner


class Link:
    """`Consensus` of ranks that are all alike, over a link whose rate a test may change."""

    ranks = 2
    device = None

    def __init__(self, gbit: float) -> None:
        self.gbit = gbit

    def max(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def probe(self) -> tuple[float, float]:
        return 1e-4, 8e-9 / self.gbit

    def cpu_oversubscribed(self) -> bool:
        return False

    def in_memory(self) -> bool:
        return False

    def emulated(self) -> bool:
        return False

    def seconds(self, sent: float) -> float:
        return 1e-4 + sent * 8e-9 / self.gbit


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
    run_steps(tuner, link, range(40))
    assert [decision.action for decision in tuner.decisions] == ["int4"]
    assert [row["plan"] for row in tuner.rows[-2:]] == ["plain DDP", "none"]
    link.gbit = 400
    run_steps(tuner, link, range(40, 80))
    assert [decision.action for decision in tuner.decisions[1:]] == ["measure again", "none"]
    assert "the link is" in tuner.decisions[1].reason and tuner.pop_uncompressed() == ["weight"]
    link.gbit = 0.05
    run_steps(tuner, link, range(80, 120))
    assert [decision.action for decision in tuner.decisions[3:]] == ["measure again", "int4"]


def run_with_disturbances(
    seconds: dict[str, float], disturbed: dict[str, list[int]], steps: int, every: int = 1000
) -> tuple[Tuner, list[str]]:
    """Run steps with a time for each candidate, 15 % longer in its ``disturbed`` turns; return what each step used."""
    tuner = Tuner(AutoConfig(every=every, candidates=["int8"]), Link(0.05))
    gradient = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    used: list[str] = []
    turns: dict[str, int] = {}
    for step in range(steps):
        tuner.begin_step(step)
        if tuner.needs_sample(step):
            tuner.sample_bucket(0, ["weight"], [gradient])
        name = "plain" if tuner.bypass else str(tuner.choose("weight", gradient).codec)
        if not used or used[-1] != name:
            turns[name] = turns.get(name, 0) + 1
        used.append(name)
        slow = 1.15 if turns[name] in disturbed.get(name, ()) else 1.0
        tuner.end_step(step, slow * seconds[name], [BucketTiming(0.0, slow * seconds[name], 10**6)])
    return tuner, used


def test_candidates_near_the_best_are_tried_again_before_the_choice() -> None:
    seconds = {"none": 1.1, "plain": 1.1, "int8": 1.0}
    tuner, _ = run_with_disturbances(seconds, {"int8": [1]}, 60)
    assert [decision.action for decision in tuner.decisions] == ["int8"]
    # Plain DDP is best, and its first turn was disturbed.
    tuner, _ = run_with_disturbances({"none": 1.1, "plain": 0.98, "int8": 1.0}, {"plain": [1]}, 60)
    assert [decision.action for decision in tuner.decisions] == ["plain DDP"]
    # Candidates far behind the best get no second turn.
    tuner, used = run_with_disturbances({"none": 5.0, "plain": 5.0, "int8": 1.0}, {}, 60)
    assert tuner.settled and used.count("plain") == COUNTED + 1


def test_the_runners_up_of_a_close_choice_are_tried_once_more() -> None:
    seconds = {"none": 1.1, "plain": 1.0, "int8": 1.05}
    tuner, used = run_with_disturbances(seconds, {"plain": [1, 2, 3]}, 300, every=50)
    assert [decision.action for decision in tuner.decisions] == ["int8", "plain DDP"]
    assert used[-100:] == ["plain"] * 100
    tuner, used = run_with_disturbances({**seconds, "int8": 0.9}, {}, 300, every=50)
    assert [decision.action for decision in tuner.decisions] == ["int8"]
    assert used[-100:] == ["int8"] * 100 and "plain" in used[50:100]


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
    run_steps(tuner, link, range(40))
    assert tuner.decisions[0].action == "int8" and "over the budget: int4" in str(tuner.decisions[0])
