"""Train a character-level GPT with FSDP2 and compressed collectives, with restarts after the loss of a rank.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise restarted ranks may connect to lost ones
    torchrun --nproc-per-node 2 --max-restarts 3 examples/fsdp_char_gpt.py
    torchrun --nproc-per-node 2 examples/fsdp_char_gpt.py --preset sdp4bit --steps 100

This is an ordinary fully_shard script; lines added for dtcomm are marked with +. It continues from its last checkpoint,
bit for bit, when it is run again or when torchrun restarts it after the loss of a rank.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import dtcomm.fsdp  # +
from dtcomm.compress.checkpoint import Checkpointed  # +


class GPT(nn.Module):
    """Maps bytes [batch, length + 1] to the mean loss of predicting each byte from the previous ones."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(128, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        symbols, targets = windows[:, :-1], windows[:, 1:]
        length = symbols.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.symbols(symbols) + self.positions(torch.arange(length))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def text() -> torch.Tensor:
    """Return the source of Python's standard library as ASCII bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return torch.frombuffer(bytearray(data.encode("ascii", errors="replace")), dtype=torch.uint8)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradients", default="int8")
    parser.add_argument("--parameters", default="fp8_e4m3")
    parser.add_argument(
        "--preset", choices=["zero++", "loco", "sdp4bit"], help="instead of --gradients and --parameters"
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("fsdp_char_gpt"), help="folder of the checkpoints"
    )
    return parser.parse_args(arguments)


def train(options: argparse.Namespace) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data, context = text(), 96

    model = GPT(options.width, options.layers, context)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if options.preset:  # +
        compression = dtcomm.fsdp.compress(model, preset=options.preset)  # +
    else:  # +
        compression = dtcomm.fsdp.compress(model, options.gradients, options.parameters)  # +
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def full_state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "compression": Checkpointed(compression)}  # +

    # torch writes .metadata last, so a folder with it is complete.
    complete = [int(path.parent.name) for path in options.checkpoints.glob("*/.metadata")]
    start = max(complete, default=0)
    if start:
        saved = full_state()
        checkpoint.load(saved, checkpoint_id=options.checkpoints / str(start))
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])

    for step in range(start, options.steps):
        generator = torch.Generator().manual_seed(step * ranks + rank)
        starts = torch.randint(len(data) - context - 1, (8,), generator=generator)
        windows = data[starts[:, None] + torch.arange(context + 1)].long()
        loss = model(windows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            checkpoint.save(full_state(), checkpoint_id=options.checkpoints / str(step + 1))
    compression.print_report()  # +


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
