"""The guard's measure of harm: the error of sketches, silence in healthy runs, alarms in harmful ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dtcomm.compress.guard import CompressionHarmful, Guard
from dtcomm.compress.measurements import SKETCH_SIZE, GradientSketch, compare_sketches
from dtcomm.compress.monitor import Monitor
from tests.support.guarded_ranks import GuardedRanks
from tests.support.simulated_ranks import SimulatedRanks

CPU = torch.device("cpu")
RANKS = 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors this small, threads cost more than they save, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def correlated(n: int, cosine: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    first, noise = torch.randn(2, n, generator=generator)
    return first, cosine * first + math.sqrt(1 - cosine**2) * noise


def test_a_sketch_is_linear_and_depends_on_names_and_indices_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 60_000, generator=generator)
    sketch = GradientSketch([("a", 0, 9001), ("b", 9001, 40_000)], CPU)
    torch.testing.assert_close(sketch(x) + 2 * sketch(y), sketch(x + 2 * y))
    moved = GradientSketch([("b", 0, 40_000), ("a", 40_000, 9001)], CPU)
    swapped = torch.cat([x[9001:49_001], x[:9001]])
    torch.testing.assert_close(moved(swapped), sketch(x))
    # Every element of a small parameter is read once.
    for index in (0, 7, 8999, 9000):
        assert sketch((torch.arange(60_000) == index).float()).abs().sum() == 1
    assert sketch(x.bfloat16()).dtype == torch.float32
    assert not torch.isfinite(sketch(torch.where(torch.arange(60_000) == 9000, math.inf, x))).all()


@pytest.mark.parametrize("numel", [9001, 100_000], ids=["whole", "sampled"])
def test_the_rate_of_false_alarms_is_the_derived_one(numel: int) -> None:
    """Of 1000 windows with a true cosine of 0.6, about 1.1 % are below 0.5; Fisher's z has the derived deviation."""
    generator = torch.Generator().manual_seed(1)
    sketch = GradientSketch([("w", 0, numel)], CPU)
    results = []
    for _ in range(1000 if numel < 10_000 else 200):
        x, y = correlated(numel, 0.6, generator)
        results.append(compare_sketches(sketch(x), sketch(y), 24))
    z = torch.tensor([math.atanh(result.cosine) for result in results])
    derived = 1 / math.sqrt(SKETCH_SIZE - 3)
    assert float(z.mean()) == pytest.approx(math.atanh(0.6), abs=0.015)
    assert float(z.std()) == pytest.approx(derived, rel=0.15)
    rate = NormalDist().cdf(-(math.atanh(0.6) - math.atanh(0.5)) / derived)
    assert rate == pytest.approx(0.011, abs=0.001)
    low = sum(result.cosine < 0.5 for result in results)
    expected = rate * len(results)
    assert abs(low - expected) < 4 * math.sqrt(expected)
    ratios = torch.tensor([math.log(result.norm_ratio) for result in results])
    assert float(ratios.std()) < 1.2 * math.sqrt((1 - 0.36) / SKETCH_SIZE)


def test_a_step_that_is_not_finite_does_not_count() -> None:
    run = GuardedRanks("int8", 2, [("w", torch.zeros(64, 64))], Guard(window=2))
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        gradients = [[torch.randn(64, 64, generator=generator)] for _ in range(2)]
        if step in (1, 4):
            gradients[1][0][3, 3] = math.nan
        run.average(gradients)
    fidelity = run.monitors[0].fidelity
    assert fidelity is not None and fidelity.cosine > 0.999 and run.monitors[0].events == []


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of scikit-learn's handwritten digits, of mean 0, and their labels, in a fixed order."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(data.images).float()[order, None] / 8 - 1
    return images, torch.from_numpy(data.target).long()[order]


def digit_batch(step: int, rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's part of the step's batch; an epoch is one permutation."""
    images, labels = digits()
    epoch, index = divmod(step, len(labels) // (size * RANKS))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    chosen = order[(index * RANKS + rank) * size :][:size]
    return images[chosen], labels[chosen]


def train(spec: str, steps: int, momentum: float = 0.9, **options: Any) -> tuple[GuardedRanks, float]:
    """Train a perceptron; return the mean loss of the last steps. ``momentum`` is the optimizer's."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    parameters = list(model.parameters())
    run = GuardedRanks(spec, RANKS, list(model.named_parameters()), **options)
    optimizer = torch.optim.SGD(parameters, 0.05, momentum=momentum)
    losses = []
    for step in range(steps):
        gradients = []
        for rank in range(RANKS):
            images, labels = digit_batch(step, rank)
            loss = functional.cross_entropy(model(images), labels)
            gradients.append(torch.autograd.grad(loss, parameters))
            losses.append(float(loss.detach()))
        for parameter, mean in zip(parameters, run.average(gradients), strict=True):
            parameter.grad = mean
        optimizer.step()
    return run, sum(losses[-10 * RANKS :]) / (10 * RANKS)


# Two windows, and two steps until the second one is evaluated.
HEALTHY = dict.fromkeys(("int8", "int4", "fp16", "int2:block=1024", "sign", "powersgd:rank=1"), 50)
HEALTHY["topk:ratio=0.01"] = 102


@pytest.mark.parametrize("spec", HEALTHY)
def test_healthy_runs_are_silent(spec: str) -> None:
    run, loss = train(spec, HEALTHY[spec])
    assert loss < 1.9
    assert run.monitors[0].events == [] and run.monitors[0].fidelity is not None


@pytest.mark.parametrize(
    "spec", ["dgc:ratio=0.01", "dgc:ratio=0.05", "numel<5000 -> int8; * -> dgc:ratio=0.01"]
)
def test_dgc_is_compared_with_gradients_that_have_its_momentum(spec: str) -> None:
    run, loss = train(spec, 102, momentum=0.0)
    fidelity = run.monitors[0].fidelity
    assert loss < 1.9
    assert fidelity is not None and fidelity.cosine > 0.65 and 0.2 < fidelity.norm_ratio < 1.1
    assert run.monitors[0].events == []


def test_momentum_that_does_not_arrive_is_flagged() -> None:
    """Everything but a hundredth of every mean is lost; the part that arrives has the right direction."""
    monitor = Monitor(Guard(window=8), ranks=(0, 1), momentum=0.9)
    layout = SimulatedRanks("dgc:ratio=0.5", 1, [("w", torch.zeros(64, 64))])._layout(torch.zeros(4096), 0)
    gradient = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for step in range(20):
        if step:
            monitor.evaluate(step, monitor.stats_tensor())
        monitor.begin_step(step)
        monitor.record_mean(monitor.measure_gradient(layout, gradient), layout, 0.01 * gradient)
    (event,) = monitor.events
    assert event.kind == "harm" and event.value < event.limit == pytest.approx(0.05)


def test_all_reductions_of_a_step_are_added_up() -> None:
    """As many as with accumulated gradients, of which only some are kept until the end of the step."""
    monitor = Monitor(Guard(window=1), ranks=(0, 1))
    layout = SimulatedRanks("int8", 1, [("w", torch.zeros(64, 64))])._layout(torch.zeros(4096), 0)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4096, generator=generator) for _ in range(300)]
    monitor.begin_step(0)
    for gradient in gradients:
        monitor.record_mean(monitor.measure_gradient(layout, gradient), layout, 2 * gradient)
    monitor.begin_step(1)
    stats = monitor.stats_tensor()
    assert stats is not None
    sketches = stats[-2 * SKETCH_SIZE :].view(2, SKETCH_SIZE)
    torch.testing.assert_close(
        sketches[0], layout.sketch(CPU)(torch.stack(gradients).sum(0)), rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(sketches[1], 2 * sketches[0])


@pytest.mark.parametrize("spec", ["int2:block=128", "int2:block=1024", "sign", "topk:ratio=0.01"])
def test_bursts_of_gradients_are_silent(spec: str) -> None:
    """Every tenth gradient is 30 times as large."""
    run = GuardedRanks(spec, RANKS, [("w", torch.zeros(64, 128))])
    generator = torch.Generator().manual_seed(0)
    drift = torch.randn(64, 128, generator=generator)
    for step in range(102):
        scale = 30.0 if step % 10 == 9 else 1.0
        run.average([[scale * (drift + torch.randn(64, 128, generator=generator))] for _ in range(RANKS)])
    assert run.monitors[0].fidelity is not None
    assert run.monitors[0].events == []


HARMFUL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "random elements with feedback": ("randk:ratio=0.01", 102, {}),
    "random elements of all ranks": ("randk:ratio=0.01,positions=shared", 102, {}),
    "signs without feedback": ("sign", 50, {"feedback": False}),
    "low rank without feedback": ("powersgd:rank=1", 50, {"feedback": False}),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_runs_that_end_worse_are_flagged(name: str) -> None:
    spec, steps, options = HARMFUL[name]
    run, _ = train(spec, steps, **options)
    event = run.monitors[0].events[0]
    assert (event.kind, event.action, event.cause) == ("harm", "warn", "compression")
    assert "cosine" in event.explanation and "times their norm" in event.explanation
    assert [str(other.events[0]) for other in run.monitors] == [str(event)] * RANKS


def test_signs_that_come_too_late_are_flagged() -> None:
    """At a rate at which SGD with whole gradients converges, SGD with delayed signs does not."""
    torch.manual_seed(0)
    run = GuardedRanks("sign", 1, [("w", torch.zeros(64, 64))])
    start = torch.randn(64, 64)
    curvature = torch.logspace(-2, 0, 64)[:, None]
    plain, weights = start.clone(), start.clone()
    for _ in range(100):
        plain -= 1.5 * curvature * plain
        (mean,) = run.average([[curvature * weights]])
        weights = weights - 1.5 * mean
    assert plain.norm() < 0.5 * start.norm() and weights.norm() > 100 * start.norm()
    assert run.monitors[0].events[0].kind == "harm"


def test_the_guard_may_stop_a_harmful_run() -> None:
    with pytest.raises(CompressionHarmful, match=r"harm is .* limit 0.7: error; cosine 0") as raised:
        train("sign", 60, feedback=False, guard=Guard(on_harm="error"))
    assert raised.value.cause == "compression" and raised.value.event.kind == "harm"
