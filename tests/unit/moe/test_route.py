"""The capacity of an expert, and the order in which its rows count against it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dtcomm.moe.route import expert_capacity, positions_of_choices


def test_expert_capacity() -> None:
    assert expert_capacity(1024, 64, choices=2) == 40
    assert expert_capacity(10, 4, factor=1.0) == 3
    assert expert_capacity(0, 4) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "argument"),
    [
        ((4, 0), {}, "num_experts"),
        ((4, 2), {"factor": 0.0}, "factor"),
        ((4, 2), {"factor": math.nan}, "factor"),
    ],
)
def test_invalid_arguments_are_refused(arguments: Any, options: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}"):
        expert_capacity(*arguments, **options)


def test_positions_among_the_choices_of_an_expert() -> None:
    experts = torch.tensor([1, 0, 1, 1, 0])
    counts = torch.tensor([2, 3])
    assert positions_of_choices(experts, counts, None).tolist() == [0, 0, 1, 2, 1]
    priorities = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.9])
    assert positions_of_choices(experts, counts, priorities).tolist() == [1, 1, 0, 2, 0]
