"""PowerSGD in the hook: what its stages may disturb. `test_simulated_ranks` has its results and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dtcomm
from dtcomm import ddp
from dtcomm.kernels import low_rank
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, WIDTH, backward, gradients, wrapped


def train_with_zero_gradients(rank: int, world_size: int) -> bool:
    """Train with zero gradients, tiny ones, then ordinary ones; return whether the last ones arrive."""
    model = wrapped(**SMALL_BUCKETS)
    ddp.compress(model, "powersgd:rank=3")
    for scale in (0.0, 0.0, 1e-20, 1.0, 1.0):
        model.zero_grad()
        backward(model, rank, 0, scale=scale)
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    return any(gradient.abs().max() > 0 for gradient in gradients(model).values() if gradient.ndim == 2)


def test_factors_recover_from_zero_gradients() -> None:
    assert run_ranks(train_with_zero_gradients, 2) == [True] * 2


def train_two_models(rank: int, world_size: int) -> bool:
    """Two models in one loss: the thread of the first is late on rank 0, that of the second on rank 1."""
    late = (32, 48)[rank]
    project_rows = low_rank.project_rows

    def late_project_rows(gradient: torch.Tensor, *args: Any) -> None:
        if gradient.numel() == late * late:
            time.sleep(0.02)
        project_rows(gradient, *args)

    low_rank.project_rows = late_project_rows
    torch.manual_seed(0)
    models = [
        DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(2))))
        for width in (32, 48)
    ]
    for model in models:
        ddp.compress(model, "* -> powersgd:rank=2")
    equal = True
    for step in range(4):
        torch.manual_seed(step * world_size + rank)
        sum(model(torch.randn(8, 32 + 16 * i)).square().mean() for i, model in enumerate(models)).backward()
        mine = torch.cat([p.grad.flatten() for model in models for p in model.parameters()])
        dtcomm.all_reduce(torch.ones(1))  # on the communicator of the group
        others = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(others, mine)
        equal = equal and all(torch.equal(mine, other) for other in others)
    return equal


def test_two_models_in_one_loss_keep_their_collectives_apart() -> None:
    assert run_ranks(train_two_models, 2) == [True, True]


def train_beside_other_sums(rank: int, world_size: int) -> bool:
    """DDP sums which parameters were used, and the backward pass sums over the group as SyncBatchNorm does."""

    def total(gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone()
        dtcomm.all_reduce(summed)
        dist.all_reduce(summed)
        return gradient + 0 * summed

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    model = DistributedDataParallel(Partly(layers, total), find_unused_parameters=True, **SMALL_BUCKETS)
    ddp.compress(model, "* -> powersgd:rank=2")
    equal = True
    for step in range(4):
        torch.manual_seed(step * world_size + rank)
        model(torch.randn(8, WIDTH), step % 2).square().mean().backward()
        mine = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        others = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(others, mine)
        equal = equal and all(torch.equal(mine, other) for other in others)
    return equal


class Partly(nn.Module):
    def __init__(self, layers: nn.ModuleList, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.hook = layers, hook

    def forward(self, x: torch.Tensor, unused: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != unused + 1:
                x = layer(x)
                x.register_hook(self.hook)
        return x


@pytest.mark.parametrize("backend", ["gloo", "dtcomm"])
def test_unused_parameters_and_sums_in_backward_keep_apart(backend: str) -> None:
    assert run_ranks(train_beside_other_sums, 2, backend=backend) == [True, True]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def compare_checkpoints(rank: int, world_size: int, spec: str) -> bool:
    """Whether gradients with reentrant checkpoints, of which each is a backward pass, equal those with others."""
    results = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Checkpointed(reentrant), **SMALL_BUCKETS)
        state = ddp.compress(model, spec)
        for step in range(3):
            torch.manual_seed(step * world_size + rank)
            model.zero_grad()
            model(torch.randn(8, WIDTH, requires_grad=True)).square().mean().backward()
        results.append((gradients(model), state.steps, state.report().messages))
    (ours, *counts), (theirs, *others) = results
    return counts == others and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "int8"])
def test_reentrant_checkpoints_change_nothing(spec: str) -> None:
    assert run_ranks(compare_checkpoints, 2, spec) == [True, True]
