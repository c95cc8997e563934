"""DDP's ``join`` on backend "dtcomm": ranks with fewer inputs than others."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from dtcomm.launch.ranks import run_ranks

INPUTS = (3, 5)  # of each rank


def train_until_inputs_end(rank: int, world_size: int) -> list[float]:
    """Return the gradient after each step, which is averaged over the ranks that still have inputs."""
    model = torch.nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(model)
    gradients = []
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(INPUTS[rank]):
            ddp(torch.ones(1, 4)).sum().backward()
            assert model.weight.grad is not None
            gradients.append(float(model.weight.grad[0, 0]))
            model.weight.grad = None
    return gradients


def test_gradients_are_divided_by_the_ranks_that_have_inputs() -> None:
    found = run_ranks(train_until_inputs_end, 2, backend="dtcomm", timeout=30)
    assert found == [[1.0] * count for count in INPUTS]
