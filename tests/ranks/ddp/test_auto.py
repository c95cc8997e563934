"""`compress(model, "auto")`: its predictions, and its choices in runs of several ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.codecs import codec
from dtcomm.compress.autotune_model import (
    NONE,
    AutoConfig,
    BucketProfile,
    LinkCosts,
    propose_candidates,
)
from dtcomm.compress.bucket_layout import Member, Segment
from dtcomm.compress.error_state import REPAYMENT_STEPS, ErrorState
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import parse_scheme
from dtcomm.ddp.autotune.measure import ProcessGroupConsensus, relative_error
from dtcomm.ddp.autotune.tuner import Tuner
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, backward, gradients, wrapped

SCHEMES = [
    parse_scheme(spec) for spec in ("none", "fp16", "int8", "int4", "topk:ratio=0.01", "powersgd:rank=1")
]
ERRORS = dict(zip(SCHEMES, [0.0, 2e-4, 6e-3, 0.1, 0.95, 0.9], strict=True))
MATRIX = (1024, 1024)


def link_costs(gbit: float, encode: float = 3e-10, cpu_oversubscribed: bool = False) -> LinkCosts:
    work = {scheme: (0.0, 0.0) if scheme == NONE else (encode, encode) for scheme in SCHEMES}
    return LinkCosts(
        ranks=2,
        latency=1e-4,
        per_byte=8e-9 / gbit,
        kernel_seconds=work,
        cpu_oversubscribed=cpu_oversubscribed,
    )


def bucket_profiles(last: float, count: int = 4) -> list[BucketProfile]:
    """Return profiles of buckets of four matrices that become ready evenly until `last`."""
    return [
        BucketProfile(
            ready=last * at / (count - 1),
            matrices=(MATRIX,) * 4,
            uncompressed_elements=4096,
            dtype=torch.float32,
        )
        for at in range(count)
    ]


def test_slow_link_gets_the_fewest_bytes_within_the_error_budget() -> None:
    for limit, expected in ((0.2, "int4"), (0.01, "int8"), (1e-3, "fp16"), (math.inf, "powersgd:rank=1")):
        best, *_, own, plain = propose_candidates(link_costs(0.1), bucket_profiles(0.05), ERRORS, limit)
        assert plain.lossless and own.bypass and str(best) == expected
        assert best.seconds < plain.seconds and best.error <= limit


def test_computation_hides_all_but_the_last_bucket() -> None:
    """Uncompressed, a bucket of 16 MiB takes 17 ms at 8 Gbit/s, and 500 ms lie between two of them."""
    candidates = propose_candidates(link_costs(8), bucket_profiles(1.5), ERRORS, 0.2)
    assert all(plan.seconds > 1.5 for plan in candidates)
    assert [str(plan) for plan in candidates] == [
        "plain DDP",
        "none",
    ]  # compression could gain less than 5 %
    mixed = propose_candidates(link_costs(0.4), bucket_profiles(1.5), ERRORS, 0.2)
    assert any("none (3 of 4 buckets)" in str(plan) and plan.schemes[-1] != NONE for plan in mixed[:-2])


def test_codecs_slower_than_the_link_are_not_proposed() -> None:
    candidates = propose_candidates(
        link_costs(100, encode=1e-8, cpu_oversubscribed=True), bucket_profiles(0.01), ERRORS, 0.2
    )
    assert [str(plan) for plan in candidates] == ["plain DDP", "none"]


@pytest.mark.parametrize("chosen", SCHEMES)
def test_relative_error_is_that_of_one_encoding(chosen: Any) -> None:
    torch.manual_seed(0)
    low_rank = torch.randn(128, 1) @ torch.randn(1, 128)
    error = relative_error(chosen, low_rank)
    if isinstance(chosen, PowerSGD):
        assert error < 1e-5
    else:
        assert error <= 1.0 and (error > 0) == (chosen != NONE)


def compare_bypass_to_ddp(rank: int, world_size: int) -> None:
    """Check that gradients have the bits of DDP without a hook when "auto" chooses the group's own backend."""
    ours, plain = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    state = ddp.compress(ours, "auto")
    for step in range(5):
        assert isinstance(state._chooser, Tuner)
        state._chooser.bypass = step >= 2
        for model in (ours, plain):
            model.zero_grad()
            backward(model, rank, step)
        for name, gradient in gradients(ours).items():
            assert torch.equal(gradient, gradients(plain)[name]) or (world_size > 2 and step < 2)
    assert state.report().wire_bytes > 0 and state.error is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_bypass_has_the_bits_of_ddp_without_a_hook(ranks: int) -> None:
    run_ranks(compare_bypass_to_ddp, ranks)


def test_residual_is_repaid_in_parts_when_compression_ends() -> None:
    error_state = ErrorState()
    segment = Segment(0, 8, codec("int8"), torch.float32, [Member("w", 8, "")])
    pending = error_state.prepare(segment, torch.zeros(8), 2)
    assert pending.residual is not None and torch.equal(pending.residual, torch.zeros(8))
    pending.residual.copy_(torch.arange(8.0))
    error_state.finish(pending, 0)
    error_state.repay_residual("w")
    total, largest = torch.zeros(8), 0.0
    for step in range(REPAYMENT_STEPS + 10):
        # The checkpoint holds the part that is not repaid yet, and compressing again continues with it.
        if step in (5, 9):
            torch.testing.assert_close(
                total + error_state.state_dict()["residuals"].get("w", 0), torch.arange(8.0)
            )
        if step == 9:
            residual = error_state.prepare(segment, torch.zeros(8), 2).residual
            torch.testing.assert_close(total + residual, torch.arange(8.0))
            error_state.repay_residual("w")
            total, largest = torch.arange(8.0) - residual, 0.0
        gradient = torch.zeros(8)
        error_state.prepare_uncompressed(segment, gradient)
        total, largest = total + gradient, max(largest, float(gradient.max()))
    torch.testing.assert_close(total, torch.arange(8.0))
    assert largest < 7 / REPAYMENT_STEPS * 1.01 and error_state.persistent_bytes() == 0


Outcome = tuple[str, list[str], list[dict[str, Any]]]


def train_with_auto(rank: int, world_size: int, steps: int, width: int) -> Outcome:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3))))
    state = ddp.compress(model, "auto")
    for step in range(steps):
        model.zero_grad()
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(step * 2 + rank))
        model(x).square().mean().backward()
    report = state.report()
    assert str(state.events[-1]) in str(report) and state.error is None
    if report.plans:
        assert report.payoff is not None
        assert (report.payoff.verdict, report.payoff.baseline) == ("paid", "plain DDP")
        assert "(both measured)" in str(report.payoff) and str(report.payoff) in str(report)
    else:  # nothing was tried, and nothing is compressed
        assert report.payoff is None
    return state.events[-1].action, [row.codec for row in report.rows], list(report.plans)


def test_auto_compresses_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_LINK", "100mbit,50us")
    results = run_ranks(train_with_auto, 2, 120, 256)
    assert results[0] == results[1]
    action, codecs, tried = results[0]
    assert action.startswith("int4") and codecs[0] == "int4"
    assert tried[-1]["plan"] == "none" and tried[0]["measured_ms"] < tried[-1]["measured_ms"]


def test_auto_stays_uncompressed_in_shared_memory() -> None:
    results = run_ranks(train_with_auto, 2, 24, 256)
    assert results[0] == results[1]
    assert results[0] == ("none", ["none"], [])


def probe_on_two_hosts(rank: int, world_size: int) -> tuple[bool, bool]:
    """Return whether the ranks share memory, and whether the link was measured; the engine uses sockets here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTCOMM_HOST_ID", f"host {rank}")
        consensus = ProcessGroupConsensus(None)
        per_byte = consensus.probe()[1]
        return consensus.in_memory(), per_byte > 0


def test_ranks_on_two_hosts_share_no_memory() -> None:
    for in_memory, measured in run_ranks(probe_on_two_hosts, 2):
        assert measured and not in_memory


def train_and_save(rank: int, world_size: int) -> dict[str, Any]:
    model = wrapped()
    state = ddp.compress(model, "auto", candidates=["int8"], check_every=3)
    step = 0
    while not state.state_dict()["auto"]:  # no choice yet
        backward(model, rank, step)
        step += 1
    return state.state_dict()


def load_and_train(
    rank: int, world_size: int, states: list[dict[str, Any]]
) -> tuple[bool, set[str], list[str]]:
    model = wrapped()
    state = ddp.compress(model, "auto", candidates=["int8"], check_every=3)
    state.load_state_dict(states[rank])
    same = state.state_dict()["auto"] == states[rank]["auto"]
    used = set()
    for step in range(state.steps, state.steps + 6):
        backward(model, rank, step)
        used |= {row.codec for row in state.report().rows}
    return same, used, [event.action for event in state.events]


def test_choice_is_restored_and_revised_on_a_faster_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as slow:
        slow.setenv("DTCOMM_LINK", "10mbit")
        states = run_ranks(train_and_save, 2)
    assert states[0]["auto"]["chosen"]["first.weight"] == "int8"
    for same, used, actions in run_ranks(load_and_train, 2, states):
        assert same and used == {"int8", "none"} and actions == ["none"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0}, "budget=0: expected a relative error above 0"),
        ({"candidates": "int8"}, "candidates='int8': expected a list of specs"),
        ({"candidates": ["dgc"]}, "dgc replaces the optimizer's momentum"),
        ({"every": 0}, "check_every=0: expected 1 or more steps"),
    ],
)
def test_invalid_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AutoConfig(**options)


def test_budget_without_auto_is_refused() -> None:
    with pytest.raises(ValueError, match="go with 'auto', got 'int8'"):
        ddp.State("int8", budget=0.1)
