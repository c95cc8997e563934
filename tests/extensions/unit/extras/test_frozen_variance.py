"""`FrozenVariance` is Adam bit for bit until the warm-up ends, and then keeps the second moment."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from dtcomm.extensions.extras import FrozenVariance

WARMUP = 5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 32))


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, tokens: int = 16
) -> list[torch.Tensor]:
    """Train on tokens below ``tokens``; return the parameters."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randint(tokens, (2, 64), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def variances(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [entry["exp_avg_sq"].clone() for entry in optimizer.state.values()]


KINDS = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True, "foreach": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (torch.optim.AdamW, {"fused": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_it_is_the_wrapped_optimizer_until_the_warmup_ends(kind: Any, options: dict[str, Any]) -> None:
    first, second = model(), model()
    plain = train(first, kind(first.parameters(), lr=0.01, **options), range(WARMUP))
    optimizer = FrozenVariance(kind(second.parameters(), lr=0.01, **options), WARMUP)
    assert optimizer.warming_up
    assert equal(plain, train(second, optimizer, range(WARMUP)))
    assert not optimizer.warming_up


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_the_variance_is_constant_afterwards(kind: Any, options: dict[str, Any]) -> None:
    net = model()
    optimizer = FrozenVariance(kind(net.parameters(), lr=0.01, **options), WARMUP)
    train(net, optimizer, range(WARMUP))
    frozen = variances(optimizer)
    first_moments = [entry["exp_avg"].clone() for entry in optimizer.state.values()]
    train(net, optimizer, range(WARMUP, 2 * WARMUP))
    assert equal(frozen, variances(optimizer))
    assert not equal(first_moments, [entry["exp_avg"] for entry in optimizer.state.values()])
    assert [float(entry["step"]) for entry in optimizer.state.values()] == [2.0 * WARMUP] * len(frozen)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_a_step_is_adams_with_the_frozen_variance(kind: Any, options: dict[str, Any]) -> None:
    """The step after the warm-up, computed in fp64 from the definition in the docstring."""
    net = model()
    inner = kind(net.parameters(), lr=0.01, **options)
    optimizer = FrozenVariance(inner, WARMUP, floor=0)
    train(net, optimizer, range(WARMUP - 1))
    beta1, beta2 = inner.param_groups[0]["betas"]
    states = [{name: value.double() for name, value in entry.items()} for entry in inner.state.values()]
    train(net, optimizer, range(WARMUP - 1, WARMUP))
    gradients = [parameter.grad.double() for parameter in net.parameters()]  # type: ignore[union-attr]
    for entry, gradient, state in zip(inner.state.values(), gradients, states, strict=True):
        expected = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient.square()
        if not (options.get("weight_decay") and kind is torch.optim.Adam):
            torch.testing.assert_close(
                entry["exp_avg_sq"].double(), expected / (1 - beta2**WARMUP), rtol=1e-5, atol=1e-12
            )
    before = [parameter.detach().double() for parameter in net.parameters()]
    states = [
        {name: entry[name].double() for name in ("exp_avg", "exp_avg_sq")} for entry in inner.state.values()
    ]
    train(net, optimizer, range(WARMUP, WARMUP + 1))
    decay = inner.param_groups[0]["weight_decay"]
    for parameter, old, state in zip(net.parameters(), before, states, strict=True):
        assert parameter.grad is not None
        gradient = parameter.grad.double() * (-1 if options.get("maximize") else 1)
        if kind is torch.optim.Adam:
            gradient = gradient + decay * old
        else:
            old = old * (1 - 0.01 * decay)
        moment = beta1 * state["exp_avg"] + (1 - beta1) * gradient
        update = 0.01 * moment / (1 - beta1 ** (WARMUP + 1)) / (state["exp_avg_sq"].sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), old - update, rtol=1e-4, atol=1e-6)


def test_elements_without_gradients_in_the_warmup_get_the_floor() -> None:
    net = model()
    optimizer = FrozenVariance(torch.optim.AdamW(net.parameters(), lr=0.01), WARMUP, floor=0.25)
    inner = optimizer.state
    train(net, optimizer, range(WARMUP - 1), tokens=16)
    embedding = next(net.parameters())
    assert not inner[embedding]["exp_avg_sq"][16:].any()
    train(net, optimizer, range(WARMUP - 1, WARMUP), tokens=16)
    variance = inner[embedding]["exp_avg_sq"]
    least = float(variance.min())
    assert least > 0
    assert torch.equal(variance[16:], torch.full_like(variance[16:], least))
    unfloored = FrozenVariance(torch.optim.AdamW((other := model()).parameters(), lr=0.01), WARMUP, floor=0)
    train(other, unfloored, range(WARMUP))
    mean = float(unfloored.state[next(other.parameters())]["exp_avg_sq"].mean())
    assert least == pytest.approx(0.25 * mean, rel=1e-5)
    # Tokens that are new after the warm-up then move their embeddings by ordinary steps.
    before = embedding.detach().clone()
    train(net, optimizer, range(WARMUP, WARMUP + 3), tokens=32)
    assert float((embedding.detach() - before).abs().max()) < 0.5


def test_a_parameter_without_any_gradient_yet_is_not_frozen() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = FrozenVariance(torch.optim.Adam([parameter], lr=0.1), 2)
    for value in (0.0, 0.0, 0.0, 1.0):
        parameter.grad = torch.full((4,), value)
        optimizer.step()
        assert optimizer.state[parameter].get("frozen", False) == (value > 0)
    assert float(parameter.detach().abs().max()) < 0.5


@pytest.mark.parametrize("saved_at", [2, WARMUP + 2])
def test_a_resumed_run_continues_bit_for_bit(saved_at: int) -> None:
    net = model()
    optimizer = FrozenVariance(torch.optim.AdamW(net.parameters(), lr=0.01), WARMUP)
    train(net, optimizer, range(saved_at))
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(net, optimizer, range(saved_at, 12))
    file.seek(0)
    saved = torch.load(file)
    resumed = model()
    resumed.load_state_dict(saved["model"])
    restored = FrozenVariance(torch.optim.AdamW(resumed.parameters(), lr=1.0), WARMUP)
    restored.load_state_dict(copy.deepcopy(saved["optimizer"]))
    assert equal(expected, train(resumed, restored, range(saved_at, 12)))


def test_a_state_of_adam_is_frozen_at_its_next_step() -> None:
    net = model()
    plain = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, plain, range(WARMUP + 3))
    optimizer = FrozenVariance(torch.optim.AdamW(net.parameters(), lr=0.01), WARMUP)
    optimizer.load_state_dict(plain.state_dict())
    train(net, optimizer, range(WARMUP + 3, WARMUP + 4))
    assert all(entry["frozen"] for entry in optimizer.state.values())


def test_schedulers_closures_scalers_and_groups() -> None:
    net = model()
    optimizer = FrozenVariance(torch.optim.AdamW(net[1].parameters(), lr=0.1), 2)
    optimizer.add_param_group({"params": list(net[3].parameters()), "lr": 0.2})
    assert len(optimizer.state_dict()["param_groups"]) == len(optimizer.param_groups) == 2
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    inputs, targets = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        return loss

    losses = []
    for _ in range(6):
        losses.append(float(optimizer.step(closure)))
        scheduler.step()
    assert losses[-1] < losses[0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1 / 64, 0.2 / 64]

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    scaler.scale(nn.functional.cross_entropy(net(inputs), targets)).backward()
    net[1].weight.grad.fill_(torch.inf)  # type: ignore[union-attr, operator]
    scaler.step(optimizer)
    scaler.update()
    assert equal(before, [parameter.detach() for parameter in net.parameters()])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: FrozenVariance(torch.optim.SGD(p), 2), TypeError, "expected a torch.optim.Adam or AdamW, got SGD"),
        (lambda p: FrozenVariance(torch.optim.Adam(p), 0), ValueError, "warmup"),
        (lambda p: FrozenVariance(torch.optim.Adam(p), 2, floor=2), ValueError, "floor: expected a number from 0 to 1"),
        (lambda p: FrozenVariance(torch.optim.Adam(p, amsgrad=True), 2), ValueError, "amsgrad=True"),
        (
            lambda p: FrozenVariance(torch.optim.Adam([*p, torch.zeros(1, dtype=torch.cfloat)]), 2),
            TypeError,
            "complex",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(list(model().parameters()))
