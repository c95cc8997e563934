"""Limits of the guard: each of them catches a planted failure that no other one catches, or catches it first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dtcomm import ddp
from dtcomm.codecs import codec
from dtcomm.compress.guard import KINDS, Event, Guard, finer, residual_limit
from dtcomm.compress.measurements import ErrorSample
from dtcomm.compress.monitor import LossMean, Monitor
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.kernels import ops
from tests.support.guarded_ranks import GuardedRanks

RANKS = 2


@dataclass(frozen=True)
class Failure:
    """A run with a planted failure, and which limit catches it.

    Attributes:
        kind: The kind of the first event.
        off: Options of `Guard` that switch the limit off that was exceeded.
        without: The kind of the first event then, in a later step; empty if nothing else catches the failure.
        spec: What gradients are compressed with.
        steps: Steps of the run.
        rate: Learning rate.
        delay: Steps by which averages arrive too late.
        share: The share of every average that arrives.
        clip: The norm to which the optimizer clips averages.
        bad_batch: Step in which one rank's gradient is 1e5 times too large.
        outlier: What is added to every 64th element of a gradient.
        unit: What gradients are multiplied by, as by a loss scale; the optimizer divides by it.
        options: Of `GuardedRanks`.
    """

    kind: str
    off: dict[str, Any]
    spec: str
    steps: int
    rate: float = 0.2
    delay: int = 0
    share: float = 1.0
    clip: float = math.inf
    bad_batch: int = -1
    outlier: float = 0.0
    unit: float = 1.0
    without: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **limits: Any) -> list[Event]:
        """Return the events of a run that minimizes a quadratic function from noisy gradients."""
        guard = Guard(**{f"on_{kind}": "warn" for kind in KINDS} | {"nonfinite": 3} | limits)
        late: deque[torch.Tensor] = deque(maxlen=self.delay + 1)

        def spoil(means: Sequence[torch.Tensor]) -> None:
            late.append(means[0].clone())
            means[0].copy_(self.share * late[0])

        parameters = [("w", torch.zeros(64, 64))]
        options = {"sample_every": 10, "spoil": spoil, **self.options}
        run = GuardedRanks(self.spec, RANKS, parameters, guard, **options)
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(64, 64, generator=generator)
        curvature = torch.logspace(-2, 0, 64)[:, None]
        for step in range(self.steps):
            gradients = []
            for rank in range(RANKS):
                gradient = curvature * weights + 0.1 * torch.randn(64, 64, generator=generator)
                gradient *= 1e5 if rank == 1 and step == self.bad_batch else 1
                gradient.view(-1)[::64] += self.outlier
                gradients.append([self.unit * gradient])
                run.monitors[rank].observe_loss((curvature * weights.square()).sum())
            mean = run.average(gradients)[0] / self.unit
            weights = weights - self.rate * mean * min(1.0, self.clip / float(mean.norm()))
        return list(run.monitors[0].events)


def failure_without_limit(kind: str, *args: Any, **options: Any) -> Failure:
    return Failure(kind, {f"on_{kind}": "ignore"}, *args, **options)


FAILURES = {
    "most elements wait too long": Failure("harm", {"cosine": 1e-9}, "randk:ratio=0.05", 80),
    "a part of every average is lost": Failure("harm", {"norm_ratio": 1e9}, "int8", 60, share=0.3),
    "outliers set the scale of all elements": failure_without_limit(
        "error",
        "int4:block=4096",
        60,
        rate=1e-4,
        outlier=1e3,
        options={"feedback": False, "held_to_error": True},
    ),
    "a bad batch comes back from the residual": failure_without_limit(
        "residual", "topk:ratio=0.01", 160, clip=10.0, bad_batch=48, without="harm"
    ),
    "gradients arrive too late for the rate": failure_without_limit(
        "loss", "int8", 60, rate=1.0, delay=3, without="harm"
    ),
    "gradients beyond the codec's range": failure_without_limit("nonfinite", "fp16", 60, unit=1e7),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_limit_catches_a_failure_first(name: str) -> None:
    failure = FAILURES[name]
    first = failure.run()[0]
    assert first.kind == failure.kind
    events = failure.run(**failure.off)
    assert next((event.kind for event in events), "") == failure.without
    assert all(event.step > first.step for event in events)


def test_noisy_losses_near_zero_raise_no_event() -> None:
    """Minibatch losses of a model that has almost learnt its data, and then one that diverges."""
    generator = torch.Generator().manual_seed(0)
    monitor = Monitor(Guard())
    for step in range(400):
        loss = math.exp(-step / 100 + float(torch.randn((), generator=generator)))
        monitor.evaluate(step, torch.tensor([0.0, loss, 0.0, 0.0, 0.0]))
    assert monitor.events == []
    for step in range(400, 410):
        monitor.evaluate(step, torch.tensor([0.0, 3.0 * 2 ** (step - 400), 0.0, 0.0, 0.0]))
    assert [event.kind for event in monitor.events][:1] == ["loss"]
    assert monitor.events[0].step < 406


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_a_loss_that_diverges_gradually_does_not_make_its_growth_usual(seed: int) -> None:
    """Noisy losses that begin to grow, by a factor of e in each step."""
    noise = torch.randn(115, generator=torch.Generator().manual_seed(seed)).tolist()
    losses = LossMean()
    assert all(losses.update(math.exp(x), 2.0) is None for x in noise[:100])
    assert any(losses.update(math.exp(x + step), 2.0) is not None for step, x in enumerate(noise[100:], 1))


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
    ("name", "value"),
    [
        *[("on_error", "panic"), ("residual", 0), ("steps", 0), ("window", 0)],
        *[("cosine", 1.5), ("norm_ratio", 0.5)],
    ],
)
def test_invalid_guard_options_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        Guard(**{name: value})


def test_a_function_of_one_rank_does_not_make_its_guard_another_one() -> None:
    guard = Guard(cosine=0.6, on_event=print)
    assert guard == Guard(cosine=0.6) and str(guard) == "Guard(cosine=0.6)"
    with pytest.raises(TypeError, match="guard: on_event is 'print'; valid: None or a function"):
        Guard(on_event="print")  # type: ignore[arg-type]


@pytest.mark.parametrize("guard", [None, Guard()])
def test_a_loss_in_text_is_refused(guard: Guard | None) -> None:
    with pytest.raises(TypeError, match="loss"):
        ddp.DDPState("int8", guard=guard).observe("0.3")  # type: ignore[arg-type]
