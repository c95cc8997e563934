"""`compress(model, "auto")` in runs of several ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp, fsdp, tp
from dtcomm.codecs import codec
from dtcomm.compress.bucket import Member, Segment
from dtcomm.compress.error_state import REPAYMENT_STEPS, ErrorState
from dtcomm.ddp.auto import PLAIN_DDP, UNCOMPRESSED, ProcessGroupConsensus, Tuner
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, backward, gradients, wrapped


def compare_bypass_to_ddp(rank: int, world_size: int) -> None:
    """Check that gradients have the bits of DDP without a hook when "auto" chooses the group's own backend."""
    ours, plain = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    state = ddp.compress(ours, "auto")
    for step in range(5):
        assert isinstance(state._chooser, Tuner)
        state._chooser._install(PLAIN_DDP if step >= 2 else UNCOMPRESSED)
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
        assert str(report.payoff) in str(report)
    else:  # nothing was tried, and nothing is compressed
        assert report.payoff is None
    return state.events[-1].action, [row.codec for row in report.rows], list(report.plans)


def test_auto_compresses_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_EMULATE_LINK", "100mbit,50us")
    results = run_ranks(train_with_auto, 2, 160, 256)
    assert results[0] == results[1]
    action, codecs, tried = results[0]
    assert codecs[0] in ("int4", "int8") and action.startswith(codecs[0])
    assert tried[-1]["plan"] == "none" and tried[-2]["measured_ms"] < tried[-1]["measured_ms"]


def train_verified(rank: int, world_size: int, spec: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(256, 256)
    state: Any
    rows, difference = 2, rank
    if spec == "tp":
        rows, difference = 256, 0  # all ranks have the same input
        model = torch.nn.Sequential(model, torch.nn.Linear(256, 256))
        state = tp.compress(model, None, "int8", {"0": "column", "1": "row"}, latency=False, verify=8)
    elif spec == "sharded":
        state = fsdp.ShardedOptimizer(
            model.named_parameters(),
            torch.optim.SGD,
            gradients="int8",
            parameters="delta:int8",
            lr=0.0,
            verify=8,
        )
    elif spec == "fsdp":
        fully_shard(model)
        state = fsdp.compress(model, "int8", "int8", verify=8)
    else:
        model = DistributedDataParallel(model)
        state = ddp.compress(model, spec, verify=8, warmup=2)
    for step in range(45):
        if step == 20:
            assert "being measured: " in str(state.report()), state.report()
        model(torch.full((rows, 256), float(step + difference))).square().mean().backward()
        if spec == "sharded":
            state.step()
    report = state.report()
    assert report.payoff is not None
    assert str(report.payoff) in str(report)
    assert report.messages == sum(row.calls for row in report.by_message)
    return {"payoff": report.payoff, "codecs": {row.codec for row in report.rows}}


@pytest.mark.parametrize("spec", ["int8", "powersgd:rank=2", "fsdp", "sharded", "tp"])
@pytest.mark.parametrize("link", ["20mbit,50us", ""])  # 80 ms less in a step, on a busy machine too
def test_verify_measures_pairs_of_steps_and_claims_what_they_show(
    monkeypatch: pytest.MonkeyPatch, link: str, spec: str
) -> None:
    """Over a slow link compression pays; in shared memory that is whatever the pairs have shown."""
    monkeypatch.setenv("DTCOMM_EMULATE_LINK", link)
    first, second = run_ranks(train_verified, 2, spec)
    codecs = {"fsdp": {"int8"}, "sharded": {"int8", "delta:int8"}, "tp": {"int8", "none"}}
    assert first == second and first["codecs"] == codecs.get(spec, {spec, "none"})
    payoff = first["payoff"]
    assert payoff.pairs == 8
    assert payoff.baseline == ("codec none" if link or spec in codecs else "plain DDP")
    if link:
        assert payoff.verdict == "paid" and payoff.won >= 7


@on_ranks(2)
def test_the_report_names_the_codec_in_every_turn_and_after_the_end(rank: int, ranks: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    state = ddp.compress(model, "int8", verify=2)
    sent = []
    for _ in range(14):
        model(torch.ones(2, 64)).sum().backward()
        report = state.report()
        assert [row.codec for row in (*report.rows, *report.by_message)] == ["int8", "int8"]
        sent.append(report.wire_bytes)
    # Both kinds of turns were there: what plain DDP sends is not what int8 sends.
    assert len({after - before for before, after in itertools.pairwise(sent)}) == 2
    assert not report.uncompressed
    state.detach()
    model(torch.ones(2, 64)).sum().backward()
    report = state.report()
    assert (
        report.uncompressed
        == "nothing is compressed after step 14: detach() was called; the counters end there"
    )
    assert report.uncompressed in report.summary() and report.wire_bytes == sent[-1]
    assert [row.codec for row in report.rows] == ["int8"]


def test_auto_stays_uncompressed_in_shared_memory() -> None:
    results = run_ranks(train_with_auto, 2, 24, 256)
    assert results[0] == results[1]
    assert results[0] == ("none", ["none"], [])


def on_two_hosts(rank: int, world_size: int) -> bool:
    """Return whether the ranks share memory; the engine uses sockets here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTCOMM_HOST_ID", f"host {rank}")
        return ProcessGroupConsensus(None).in_memory()


def test_ranks_on_two_hosts_share_no_memory() -> None:
    assert run_ranks(on_two_hosts, 2) == [False, False]


def train_and_save(rank: int, world_size: int) -> dict[str, Any]:
    model = wrapped()
    state = ddp.compress(model, "auto", candidates=["int8"])
    step = 0
    while not state.state_dict()["auto"]:  # no choice yet
        backward(model, rank, step)
        step += 1
    return state.state_dict()


def load_and_train(
    rank: int, world_size: int, states: list[dict[str, Any]]
) -> tuple[bool, set[str], list[str]]:
    model = wrapped()
    state = ddp.compress(model, "auto", candidates=["int8"])
    state.load_state_dict(states[rank])
    same = state.state_dict()["auto"] == states[rank]["auto"]
    used = set()
    for step in range(state.steps, state.steps + 6):
        backward(model, rank, step)
        used |= {row.codec for row in state.report().rows}
    return same, used, [event.action for event in state.events]


def test_a_choice_is_restored_and_dropped_where_ranks_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as slow:
        slow.setenv("DTCOMM_EMULATE_LINK", "10mbit")
        states = run_ranks(train_and_save, 2)
        assert states[0]["auto"] == {"chosen": "int8", "bypass": False}
        for same, used, actions in run_ranks(load_and_train, 2, states):
            assert same and "int8" in used and actions == []
    for same, used, actions in run_ranks(load_and_train, 2, states):
        assert same and used == {"none"} and actions == ["none"]


def test_what_goes_with_auto_alone_is_refused_without_it() -> None:
    with pytest.raises(ValueError, match="candidates"):
        ddp.DDPState("int8", candidates=["int4"])
    with pytest.raises(ValueError, match="retune"):
        ddp.DDPState("int8").retune()
