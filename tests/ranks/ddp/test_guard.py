"""The guard detects failures on every rank in the same step and acts on them; ordinary training raises no event."""

from __future__ import annotations

import math

import pytest
import torch

from dtcomm import ddp
from dtcomm.compress.checkpoint import seal
from dtcomm.compress.guard import CompressionHarmful, Event, Guard
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, backward, batch, gradients, train, wrapped

Events = list[tuple[int, str, str, str]]


def events_of(state: ddp.DDPState) -> Events:
    return [(event.step, event.kind, event.name, event.action) for event in state.events]


def codecs_in_use(state: ddp.DDPState) -> dict[str, str]:
    """Return what each parameter was compressed with last."""
    return {
        member.name: str(segment.codec)
        for layout in state._reducer.layouts.current.values()
        for segment in layout.segments
        for member in segment.members
    }


def train_normally(rank: int, world_size: int, spec: str) -> Events:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, spec, sample_every=3)
    for step in range(20):
        state.observe(1.0 / (step + 1) + 0.1 * rank)
        model.zero_grad()
        backward(model, rank, step)
    return events_of(state)


@pytest.mark.parametrize("spec", ["int8", "fp16", "int8:round=stochastic", "powersgd:rank=2"])
def test_ordinary_training_raises_no_event(spec: str) -> None:
    assert run_ranks(train_normally, 2, spec) == [[], []]


def train_with_signs(rank: int, world_size: int, guard: Guard) -> tuple[Events, dict[str, str], float, str]:
    """Train with signs alone, whose sum over a window is not that of the gradients."""
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "sign", feedback=False, guard=guard, sample_every=0)
    for step in range(10):
        model.zero_grad()
        backward(model, rank, step)
    report = state.report()
    assert report.fidelity is not None and report.fidelity.steps == 2 and str(report.fidelity) in str(report)
    return events_of(state), codecs_in_use(state), report.fidelity.cosine, str((*state.events, "")[0])


def test_a_scheme_that_loses_gradients_gets_more_precision() -> None:
    """Windows of the steps 0 and 1, 2 and 3; the second one is sent in step 4 and evaluated when step 5 begins."""
    results = run_ranks(train_with_signs, 2, Guard(cosine=0.95, window=2, on_harm="finer"))
    assert results[0] == results[1]
    events, codecs, cosine, text = results[0]
    assert events == [(5, "harm", "", "finer")]
    assert set(codecs.values()) == {"int4", "none"}
    assert cosine > 0.99  # steps 6 and 7, with int4
    assert "harm is 0." in text and "limit 0.95: finer; cosine 0." in text


def test_guard_may_ignore_or_only_warn() -> None:
    for action, expected in (("warn", {"sign", "none"}), ("uncompressed", {"none"})):
        guard = Guard(cosine=0.95, window=2, on_harm=action)
        events, codecs = run_ranks(train_with_signs, 2, guard)[0][:2]
        assert events and set(codecs.values()) == expected


def tell_of_events(rank: int, world_size: int, action: str) -> tuple[list[str], int, str]:
    """Train with signs until the guard or its function raises; return what the function got, the step and the error."""
    told: list[Event] = []

    def on_event(event: Event) -> None:
        told.append(event)
        if len(told) == 2:
            raise LookupError("from the function")

    model = wrapped(**SMALL_BUCKETS)
    guard = Guard(cosine=0.95, window=2, on_harm=action, on_event=on_event)
    state = ddp.compress(model, "sign", feedback=False, guard=guard, sample_every=0)
    for step in range(10):
        model.zero_grad()
        try:
            backward(model, rank, step)
        except (LookupError, CompressionHarmful) as error:
            assert state.events == tuple(told)
            return list(map(str, told)), step, type(error).__name__
    raise AssertionError("nothing was raised")


CALLS = [("warn", 2, 9, "LookupError"), ("error", 1, 5, "CompressionHarmful")]


@pytest.mark.parametrize(("action", "events", "last_step", "error"), CALLS)
def test_the_guard_calls_a_function_on_every_rank(
    action: str, events: int, last_step: int, error: str
) -> None:
    """The first event is that of step 5, as above; the second one is that of the next two windows."""
    first, second = run_ranks(tell_of_events, 2, action)
    assert first == second
    told, step, raised = first
    assert len(told) == events and raised == error and step == last_step
    assert told[0].startswith("step 5: harm is ") and f": {action}; cosine" in told[0]


def train_with_infinite_loss(rank: int, world_size: int, on_all: bool) -> tuple[str, int, str, int | None]:
    model = wrapped(**SMALL_BUCKETS)
    ddp.compress(model, "int8", guard=Guard(nonfinite=3))
    for step in range(10):
        model.zero_grad()
        try:
            backward(model, rank, step, scale=math.inf if (rank == 1 or on_all) and step >= 2 else 1.0)
        except CompressionHarmful as error:
            return str(error), step, error.cause, error.rank
    return "", -1, "", -1


def test_repeated_nan_on_one_rank_stops_all_ranks() -> None:
    """Bad steps are 2, 3 and 4; their statistics are sent in 3, 4 and 5, and evaluated when 6 begins."""
    text = (
        "step 6: nonfinite is 3, limit 3: error; the gradients of rank 1 held NaN or Inf before compression"
    )
    assert run_ranks(train_with_infinite_loss, 2, False) == [(text, 6, "gradients", 1)] * 2
    text = text.replace("rank 1 held", "2 of 2 ranks held") + "; the weights may hold them already"
    assert run_ranks(train_with_infinite_loss, 2, True) == [(text, 6, "gradients", None)] * 2


def train_beyond_fp16(rank: int, world_size: int) -> tuple[str, str, int | None]:
    """Train with finite fp32 gradients that fp16 cannot hold."""
    model = wrapped(**SMALL_BUCKETS)
    ddp.compress(model, "fp16", guard=Guard(nonfinite=2))
    for step in range(6):
        model.zero_grad()
        try:
            backward(model, rank, step, scale=1e30)
        except CompressionHarmful as error:
            return str(error), error.cause, error.rank
    return "", "", -1


def test_compression_is_blamed_for_overflows_that_it_causes() -> None:
    for text, cause, rank in run_ranks(train_beyond_fp16, 2):
        assert cause == "compression" and rank is None, text
        assert "the gradients of all ranks were finite before compression" in text


def train_with_stale_residual(rank: int, world_size: int) -> tuple[Events, float]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int8", feedback=True, sample_every=2)
    train(model, rank, range(2))
    saved = state.state_dict()
    for residual in saved["residuals"].values():
        residual.fill_(1e6)
    # int8 encodes the other residuals, whose elements are equal, almost without an error. The error of random ones
    # exceeds the limit.
    saved["residuals"]["first.weight"].normal_()
    saved["residuals"]["first.weight"] *= 1e4
    state.load_state_dict(seal(saved))
    train(model, rank, range(2, 7), rate=0.0)
    largest = max(float(residual.abs().max()) for residual in state.state_dict()["residuals"].values())
    return events_of(state), largest


def test_a_residual_far_larger_than_the_gradient_is_reset() -> None:
    for events, largest in run_ranks(train_with_stale_residual, 2):
        assert ("residual", "first.weight", "reset") in {event[1:] for event in events}
        assert largest < 10


def train_with_loss_jump(rank: int, world_size: int) -> tuple[Events, set[str], set[str]]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int8", guard=Guard(steps=4))
    during: set[str] = set()
    for step in range(20):
        state.observe(1.0 if step < 8 or step > 10 else 50.0)
        model.zero_grad()
        backward(model, rank, step)
        if step == 11:
            during = set(codecs_in_use(state).values())
    return events_of(state), during, set(codecs_in_use(state).values())


def test_loss_jump_turns_compression_off_for_a_while() -> None:
    for events, during, after in run_ranks(train_with_loss_jump, 2):
        assert events == [(10, "loss", "", "uncompressed")]  # sent in 8 and 9, evaluated when 9 and 10 begin
        assert during == {"none"} and after == {"none", "int8"}


def train_with_excessive_rate(rank: int, world_size: int) -> tuple[Events, set[str], list[float]]:
    """Train with a learning rate that is right for 15 steps and a hundred times larger afterwards."""
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int8")
    losses = []
    during: set[str] = set()
    for step in range(22):
        model.zero_grad()
        loss = (model(batch(rank, step)) - 1).square().mean()
        state.observe(loss.detach())
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= (0.05 if step < 15 else 5.0) * parameter.grad
        during |= set(codecs_in_use(state).values()) if step == 21 else set()
    return events_of(state), during, losses


def test_diverging_training_turns_compression_off() -> None:
    for events, during, losses in run_ranks(train_with_excessive_rate, 2):
        assert losses[18] > 10 * losses[14]
        assert events[0][0] in (19, 20, 21) and events[0][1:] == ("loss", "", "uncompressed"), (
            events,
            losses,
        )
        assert during == {"none"}


def train_with_loss_on_one_rank(rank: int, world_size: int) -> Events:
    """One rank has a loss and the other one NaN: the mean is over the ranks with a finite loss."""
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int8")
    for step in range(12):
        if rank == 0:
            state.observe(1.0)
        else:
            state.observe(torch.tensor(math.nan))
        model.zero_grad()
        backward(model, rank, step)
    return events_of(state)


def test_mean_loss_ignores_ranks_without_a_finite_loss() -> None:
    assert run_ranks(train_with_loss_on_one_rank, 2) == [[], []]


def train_with_warmup(rank: int, world_size: int) -> list[set[str]]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int8", warmup=3)
    used = []
    for step in range(5):
        model.zero_grad()
        backward(model, rank, step)
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())
        used.append(set(codecs_in_use(state).values()))
    assert state.report().rows[0].reason in ("", "warm-up until step 3")
    return used


def test_warm_up_is_uncompressed() -> None:
    assert run_ranks(train_with_warmup, 2) == [[{"none"}] * 3 + [{"none", "int8"}] * 2] * 2


def resume_with_decisions(rank: int, world_size: int) -> tuple[dict[str, str], dict[str, int]]:
    """Return what parameters are compressed with after a checkpoint is loaded, and the events before it."""
    model = wrapped(**SMALL_BUCKETS)
    guard = Guard(cosine=0.95, window=2, on_harm="finer")
    state = ddp.compress(model, "sign", feedback=False, guard=guard)
    train(model, rank, range(6))
    saved = state.state_dict()
    second_model = wrapped(**SMALL_BUCKETS)
    resumed = ddp.compress(second_model, "sign", feedback=False, sample_every=0)
    resumed.load_state_dict(saved)
    train(second_model, rank, range(6, 7))
    return codecs_in_use(resumed), dict(state.report().events)


def test_decisions_are_restored_from_the_state() -> None:
    for codecs, events in run_ranks(resume_with_decisions, 2):
        assert set(codecs.values()) == {"int4", "none"}
        assert events == {"harm: finer": 1}
