"""Expert parallelism: a mixture of experts on several ranks that exchange compressed tokens.

    torchrun --nproc-per-node 2 examples/moe.py --codec fp8_e4m3

Each token goes to two of four experts. The layer learns a fixed function.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import dtcomm.moe

WIDTH, EXPERTS, CHOICES = 32, 4, 2


class Experts(nn.Module):
    def __init__(self, codec: str) -> None:
        super().__init__()
        self.codec = codec
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)  # the same on all ranks
        torch.manual_seed(1 + dist.get_rank())
        local_experts = EXPERTS // dist.get_world_size()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(local_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(CHOICES)
        tokens, route = dtcomm.moe.dispatch(x, chosen, EXPERTS, codec=self.codec, backward_codec=self.codec)
        outputs = [expert(part) for expert, part in zip(self.experts, route.split(tokens), strict=True)]
        return dtcomm.moe.combine(torch.cat(outputs), route, weights)


def run(codec: str = "fp8_e4m3", steps: int = 100) -> list[float]:
    """Train and return the loss of each step."""
    layer = Experts(codec)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        x = torch.randn(64, WIDTH, generator=generator)
        loss = (layer(x) - torch.sin(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in layer.router.parameters():  # experts already have the gradients of all ranks' tokens
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="fp8_e4m3")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    run(options.codec, options.steps)
    dist.destroy_process_group()
