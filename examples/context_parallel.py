"""Context parallelism: train a character-level GPT whose sequences are divided among the ranks.

    torchrun --nproc-per-node 2 examples/context_parallel.py --method ring --codec int8

Every rank has the whole model and a part of each sequence. Attention exchanges compressed keys and values; DDP averages
the gradients of the parameters, which come from all parts.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm.cli.demo.train import GPT, VOCABULARY, ModelShape, load_corpus, training_batch

SHAPE = ModelShape(vocabulary=VOCABULARY, context=128, layers=2, width=64, heads=4)


class ShardedGPT(nn.Module):
    """The demo's model, with the positions of this rank's tokens as an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(SHAPE)

    def forward(self, symbols: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.gpt.symbols(symbols) + self.gpt.positions(positions)
        return self.gpt.head(self.gpt.norm(self.gpt.blocks(x)))  # attention is torch's function


def run(codec: str = "int8", method: str = "ring", steps: int = 100) -> list[float]:
    """Train and return the loss of each step."""
    model = DistributedDataParallel(ShardedGPT())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    corpus = load_corpus(limit=1_000_000)
    losses = []
    for step in range(steps):
        # Whole sequences, the same on all ranks.
        symbols, targets = training_batch(corpus, seed=0, step=step, rank=0, size=4, length=SHAPE.context)
        positions = torch.arange(SHAPE.context)
        with dtcomm.context_parallel.context_parallel(
            buffers=[symbols, targets, positions], buffer_seq_dims=[1, 1, 0], method=method, kv_codec=codec
        ) as state:
            logits = model(symbols, positions)  # the buffers are this rank's part now
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.3f}", flush=True)
    state.print_report()  # of the last step
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="int8", help="of keys and values")
    parser.add_argument("--method", default="ring", choices=["ring", "all_gather", "ulysses"])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    run(options.codec, options.method, options.steps)
    dist.destroy_process_group()
