"""The model that the tests shard, and how they train it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH = 33  # odd sizes, so that shards are padded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    reentrant = False  # the first block is recomputed in a nested backward pass

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            recompute = self.reentrant and block is self.blocks[0]
            x = checkpoint(block, x, use_reentrant=True) if recompute else block(x)
        out: torch.Tensor = self.head(x)
        return out


def sharded(mesh: Any, **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(model: nn.Module, rank: int, steps: int = 3, accumulate: bool = False) -> dict[str, torch.Tensor]:
    """Train, and return the full gradients of the last step and the full parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: dict[str, torch.Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2 if accumulate else 1):
            if accumulate:
                model.set_requires_gradient_sync(micro == 1)  # type: ignore[operator]
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            model(x.requires_grad_()).float().square().mean().backward()
        gradients = {f"gradient of {n}": p.grad.full_tensor() for n, p in model.named_parameters()}
        optimizer.step()
    return gradients | {n: p.full_tensor().detach() for n, p in model.named_parameters()}
