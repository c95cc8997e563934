"""The router's losses by their formulas, and the capacity of an expert."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dtcomm import moe


def test_load_balancing_loss_is_that_of_switch_transformer() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    probabilities = logits.softmax(1)
    experts = probabilities.argmax(1)
    loss = moe.load_balancing_loss(probabilities, experts)
    expected = 0.0
    for expert in range(8):
        f = sum(1 for choice in experts.tolist() if choice == expert) / 50
        expected += 8 * f * sum(probabilities[:, expert].tolist()) / 50
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert logits.grad is not None and float(logits.grad.abs().sum()) > 0


def test_load_balancing_loss_is_one_if_balanced_and_the_number_of_experts_if_not() -> None:
    balanced = torch.arange(8).view(4, 2)
    assert float(moe.load_balancing_loss(torch.full((4, 8), 1 / 8), balanced)) == pytest.approx(1)
    one = torch.zeros(4, 8)
    one[:, 3] = 1
    assert float(moe.load_balancing_loss(one, torch.full((4,), 3))) == pytest.approx(8)


def test_router_z_loss_is_that_of_st_moe() -> None:
    logits = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    expected = sum(math.log(sum(map(math.exp, row))) ** 2 for row in logits.tolist()) / 2
    assert float(moe.router_z_loss(logits)) == pytest.approx(expected, rel=1e-6)
    assert moe.router_z_loss(logits.bfloat16()).dtype == torch.float32


def test_expert_capacity() -> None:
    assert moe.expert_capacity(1024, 64, choices=2) == 40
    assert moe.expert_capacity(10, 4, factor=1.0) == 3
    assert moe.expert_capacity(0, 4) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: moe.load_balancing_loss(torch.ones(4), torch.zeros(4)), "probabilities: expected"),
        (lambda: moe.load_balancing_loss(torch.ones(4, 2), torch.zeros(3)), "experts: expected"),
        (lambda: moe.router_z_loss(torch.ones(0, 4)), "logits: expected"),
        (lambda: moe.expert_capacity(4, 0), "num_experts=0"),
        (lambda: moe.expert_capacity(4, 2, factor=0.0), "factor: expected a positive number"),
        (lambda: moe.expert_capacity(4, 2, factor=math.nan), "factor: expected a positive number"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
