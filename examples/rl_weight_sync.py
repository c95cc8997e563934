"""Two engines follow a small GPT that two ranks train, over an emulated link of 1 Gbit/s and 75 ms round trip.

    python examples/rl_weight_sync.py [--steps 6] [--width 128]

The trainer publishes a version after each step. One engine is killed in the middle and started again; it catches up. At
the end the loss of each engine on a fixed batch equals the trainer's to the bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from dtcomm.extensions.weights import Publisher, Server, Subscriber

LINK = "1gbit,37500us"  # the latency is that of one direction
VOCABULARY, CONTEXT = 64, 32


class GPT(nn.Module):
    """A language model of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    return (first + 3 * torch.arange(CONTEXT)) % VOCABULARY


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(rank: int, options: argparse.Namespace, folder: str, results: Queue[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(GPT(options.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    publisher = Publisher(model.module, f"{folder}/versions", dtype=torch.bfloat16, model="gpt")
    for step in range(options.steps):
        optimizer.zero_grad()
        loss_of(model, batch(2 * step + rank)).backward()
        optimizer.step()
        publisher.publish()
    if rank == 0:
        copy = GPT(options.width).bfloat16().eval().requires_grad_(False)
        copy.load_state_dict(model.module.state_dict())
        results.put(("trainer", loss_of(copy, batch(-1)).item(), publisher.report()))
    dist.destroy_process_group()


def follow(name: str, options: argparse.Namespace, address: str, goal: int, results: Queue[Any]) -> None:
    torch.set_num_threads(1)
    model = GPT(options.width).bfloat16().eval().requires_grad_(False)
    engine = Subscriber(model, f"tcp://{address}", model="gpt", timeout_s=60)
    for version in range(options.steps) if goal < 0 else [goal]:
        engine.update(at_least=version)
    if goal >= 0:
        os.kill(os.getpid(), 9)
    results.put((name, loss_of(model, batch(-1)).item(), engine.report()))
    engine.close()


def main() -> int:
    """Run the trainer and the engines; return 1 if a loss differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="of the trainer")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTCOMM_EMULATE_LINK"] = LINK
        server = Server(f"{folder}/versions", "127.0.0.1:0")
        del os.environ["DTCOMM_EMULATE_LINK"]  # between the trainer's ranks there is none
        killed = context.Process(target=follow, args=("killed", options, server.address, 1, results))
        others = [context.Process(target=train, args=(rank, options, folder, results)) for rank in range(2)]
        others.append(context.Process(target=follow, args=("engine 0", options, server.address, -1, results)))
        for process in (killed, *others):
            process.start()
        killed.join(120)
        others.append(context.Process(target=follow, args=("engine 1", options, server.address, -1, results)))
        others[-1].start()
        found = {name: (loss, report) for name, loss, report in (results.get(timeout=120) for _ in range(3))}
        for process in others:
            process.join(60)
        server.close()
    for name, (loss, report) in found.items():
        print(f"{name}: loss {loss!r}, {json.dumps(report)}")
    return 0 if len({loss for loss, _ in found.values()}) == 1 and killed.exitcode == -9 else 1


if __name__ == "__main__":
    raise SystemExit(main())
