"""The guard detects failures on every rank in the same step and acts on them; ordinary training raises no event."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dtcomm import ddp
from dtcomm.codecs import codec
from dtcomm.compress.guard import CompressionHarmful, Guard, finer, residual_limit
from dtcomm.compress.measurements import ErrorSample
from dtcomm.compress.monitor import GuardMonitor
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.kernels import ops
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, backward, batch, gradients, train, wrapped

Events = list[tuple[int, str, str, str]]


def events_of(state: ddp.State) -> Events:
    return [(event.step, event.kind, event.name, event.action) for event in state.events]


def codecs_in_use(state: ddp.State) -> dict[str, str]:
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
    results = run_ranks(train_with_signs, 2, Guard(cosine=0.95, window=2, on_harm="raise"))
    assert results[0] == results[1]
    events, codecs, cosine, text = results[0]
    assert events == [(5, "harm", "", "raise")]
    assert set(codecs.values()) == {"int4", "none"}
    assert cosine > 0.99  # steps 6 and 7, with int4
    assert (
        "harm is 0." in text
        and "limit 0.95: raise; over 2 steps the averaged gradients had cosine 0." in text
    )


def test_guard_may_ignore_or_only_warn() -> None:
    for action, expected in (("warn", {"sign", "none"}), ("none", {"none"})):
        guard = Guard(cosine=0.95, window=2, on_harm=action)
        events, codecs = run_ranks(train_with_signs, 2, guard)[0][:2]
        assert events and set(codecs.values()) == expected


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
    text = "step 6: nonfinite is 3, limit 3: stop; the gradients of rank 1 held NaN or Inf before compression"
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
    state = ddp.compress(model, "int8", sample_every=2)
    train(model, rank, range(2))
    saved = state.state_dict()
    for residual in saved["residuals"].values():
        residual.fill_(1e6)
    # int8 encodes the other residuals, whose elements are equal, almost without an error. The error of random ones
    # exceeds the limit.
    saved["residuals"]["first.weight"].normal_()
    saved["residuals"]["first.weight"] *= 1e4
    state.load_state_dict(saved)
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
        assert events == [(10, "loss", "", "none")]  # sent in 8 and 9, evaluated when 9 and 10 begin
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
        assert events[0][0] in (19, 20, 21) and events[0][1:] == ("loss", "", "none"), (events, losses)
        assert during == {"none"}


def test_noisy_losses_near_zero_raise_no_event() -> None:
    """Minibatch losses of a model that has almost learnt its data, and then one that diverges."""
    generator = torch.Generator().manual_seed(0)
    monitor = GuardMonitor(Guard())
    for step in range(400):
        loss = math.exp(-step / 100 + float(torch.randn((), generator=generator)))
        monitor.evaluate(step, torch.tensor([0.0, loss, 0.0, 0.0, 0.0, 0.0]))
    assert monitor.events == []
    for step in range(400, 410):
        monitor.evaluate(step, torch.tensor([0.0, 3.0 * 2 ** (step - 400), 0.0, 0.0, 0.0, 0.0]))
    assert [event.kind for event in monitor.events][:1] == ["loss"]
    assert monitor.events[0].step < 406


@pytest.mark.parametrize("spec", ["int8", "int4", "int3", "int2", "int2:symmetric=false", "mxfp4"])
@pytest.mark.parametrize("tails", [None, 3.0])
def test_the_error_distinguishes_outliers_from_few_bits(spec: str, tails: float | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(8192) if tails is None else torch.distributions.StudentT(tails).sample((8192,))
    spiky = x.clone()
    spiky[::16] = 1e6
    missing = []
    for gradient in (x, spiky):
        sample = ErrorSample.take("w", codec(spec), 1.0, gradient, None)
        lost = torch.zeros_like(gradient)
        ops.encode(spec, gradient, residual=lost)
        missing.append(float(sample.measure(lost)[0]))
    assert missing[0] < 0.85
    assert missing[1] > 0.9


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
    guard = Guard(cosine=0.95, window=2, on_harm="raise")
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
        assert events == {"harm: raise": 1}


@pytest.mark.parametrize("name", ["int8", "fp16", "bf16", "none"])
def test_finer_ends_at_none(name: str) -> None:
    scheme: Any = codec(name)
    for _ in range(12):
        scheme = finer(scheme)
    assert scheme == codec("none")


def test_finer_powersgd_has_a_higher_rank() -> None:
    scheme = finer(PowerSGD(rank=4))
    assert scheme == PowerSGD(rank=8) and residual_limit(scheme) > residual_limit(codec("int8"))
    assert str(finer(PowerSGD(rank=16))) == "fp16"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_error": "panic"}, "on_error is 'panic'; valid: ignore, warn"),
        ({"spike": 0}, "spike is 0; valid: a number above 0"),
        ({"steps": 0}, "steps is 0; valid: 1 or more"),
        ({"window": 0}, "window is 0; valid: 1 or more"),
        ({"cosine": 1.5}, "cosine is 1.5; valid: None or a number between 0 and 1"),
        ({"norm_ratio": 0.5}, "norm_ratio is 0.5; valid: a number above 1"),
    ],
)
def test_invalid_guard_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Guard(**options)
