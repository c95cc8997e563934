"""Expert parallelism: a mixture of experts on several ranks that exchange compressed tokens.

    torchrun --nproc-per-node 2 examples/moe.py --codec fp8_e4m3

Each token goes to two of four experts. The layer learns a fixed function.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtcomm.moe

WIDTH, EXPERTS, CHOICES = 32, 4, 2


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def run(codec: str = "fp8_e4m3", steps: int = 100) -> list[float]:
    """Train and return the loss of each step."""
    torch.manual_seed(0)
    layer = dtcomm.moe.MoE(WIDTH, EXPERTS, expert, top_k=CHOICES, codec=codec)
    # DDP averages the router's gradients; those of experts come from all ranks' tokens already.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        layer, list(dtcomm.moe.expert_parameters(layer))
    )
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        x = torch.randn(64, WIDTH, generator=generator)
        loss = (model(x) - torch.sin(x)).square().mean()
        optimizer.zero_grad()
        (loss + layer.auxiliary_loss).backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 20 == 0:
            statistics = layer.statistics.to_dict()
            print(f"step {step:3d}  loss {losses[-1]:.3f}  load {statistics['largest_load']:.2f}", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="fp8_e4m3")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    run(options.codec, options.steps)
    dist.destroy_process_group()
