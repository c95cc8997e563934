"""Models and batches for the DDP tests: run in milliseconds, and large enough to be compressed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 48


class Net(nn.Module):
    """Matrices of 2304 elements, vectors, and a branch that a batch may leave unused."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.branch = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.last = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        if branch:
            x = x + self.branch(x)
        out: torch.Tensor = self.last(x)
        return out


#: Three buckets after the rebuild, where the default would make one.
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.012}


def wrapped(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(Net(dtype), **options)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, WIDTH, generator=generator).to(dtype)


def backward(model: nn.Module, rank: int, step: int, branch: bool = True, scale: float = 1.0) -> None:
    out = model(batch(rank, step, next(model.parameters()).dtype), branch)
    (scale * out.float().square().mean()).backward()


def gradients(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.module.named_parameters()
        if parameter.grad is not None
    }


def train(
    model: DistributedDataParallel, rank: int, steps: range, rate: float = 0.05
) -> list[dict[str, torch.Tensor]]:
    """Train with plain SGD and return the gradients of every step."""
    gradients_by_step = []
    for step in steps:
        model.zero_grad()
        backward(model, rank, step)
        gradients_by_step.append(gradients(model))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= rate * parameter.grad
    return gradients_by_step


@contextmanager
def local_gradients(model: DistributedDataParallel) -> Iterator[dict[str, torch.Tensor]]:
    """Fill the dict with this rank's own gradients, before any averaging."""
    gradients_by_name: dict[str, torch.Tensor] = {}
    handles = [
        parameter.register_hook(
            lambda gradient, name=name: gradients_by_name.__setitem__(name, gradient.clone())
        )
        for name, parameter in model.module.named_parameters()
    ]
    yield gradients_by_name
    for handle in handles:
        handle.remove()
