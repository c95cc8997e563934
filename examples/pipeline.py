"""Pipeline parallelism with two stages that exchange compressed activations and gradients.

    torchrun --nproc-per-node 2 examples/pipeline.py --codec int8 --feedback

The schedule is GPipe's: all micro-batches forward, then all backward. A send does not wait for the other stage.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import dtcomm.pipeline

WIDTH, MICRO, BATCH = 32, 4, 16


def first(codec: str, steps: int) -> list[float]:
    """Run stage 0, which sends activations."""
    stage = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    optimizer = torch.optim.Adam(stage.parameters(), lr=1e-2)
    link = dtcomm.pipeline.Sender(1, codec)
    for step in range(steps):
        sent = [link(stage(x)) for x in inputs(step)]
        optimizer.zero_grad()
        for activation in sent:
            activation.backward()  # receives the gradient
        optimizer.step()
    link.flush()
    print(
        f"stage 0 sent {link.sent_bytes} bytes, without compression {steps * MICRO * BATCH * WIDTH * 4}",
        flush=True,
    )
    return []


def second(codec: str, steps: int, feedback: bool) -> list[float]:
    """Run stage 1, which computes the loss, and return the loss of each step."""
    stage = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    optimizer = torch.optim.Adam(stage.parameters(), lr=1e-2)
    link = dtcomm.pipeline.Receiver(0, codec, feedback=feedback)
    losses = []
    for step in range(steps):
        outputs = [stage(link((BATCH, WIDTH))) for _ in range(MICRO)]
        optimizer.zero_grad()
        total = 0.0
        for y, x in zip(outputs, inputs(step), strict=True):
            loss = (y - torch.sin(x)).square().mean() / MICRO
            loss.backward()  # sends the gradient of the received activation
            total += loss.item()
        optimizer.step()
        losses.append(total)
        if step % 20 == 0:
            print(f"step {step:3d}  loss {total:.3f}", flush=True)
    link.flush()
    return losses


def inputs(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(MICRO)]


def run(codec: str = "int8", steps: int = 100, feedback: bool = False) -> list[float]:
    """Train; stage 1 returns the loss of each step."""
    torch.manual_seed(dist.get_rank())
    return first(codec, steps) if dist.get_rank() == 0 else second(codec, steps, feedback)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--feedback", action="store_true", help="error feedback for the gradients")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    run(options.codec, options.steps, options.feedback)
    dist.destroy_process_group()
