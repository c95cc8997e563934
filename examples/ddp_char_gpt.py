"""Train a character-level GPT with DistributedDataParallel and compressed gradients.

    torchrun --nproc-per-node 2 examples/ddp_char_gpt.py
    torchrun --nproc-per-node 2 examples/ddp_char_gpt.py --codec none --steps 100

This is an ordinary DDP script; lines added for dtcomm are marked with +. With --resume it continues from its
checkpoint, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dtcomm.ddp  # +


class GPT(nn.Module):
    """Maps bytes [batch, length] to logits [batch, length, 128]."""

    def __init__(self, width: int = 128, layers: int = 4, context: int = 96) -> None:
        super().__init__()
        self.symbols = nn.Embedding(128, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.symbols(symbols) + self.positions(torch.arange(symbols.shape[1]))
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))


def text() -> torch.Tensor:
    """Return the source of Python's standard library as ASCII bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return torch.frombuffer(bytearray(data.encode("ascii", errors="replace")), dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("char_gpt"), help="prefix of the files, one for each rank"
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--trace", help="write a timeline of the last 100 steps, one file per rank")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    data, context = text(), 96

    model = DistributedDataParallel(GPT(context=context))
    compression = dtcomm.ddp.compress(model, options.codec, timeline=100 if options.trace else 0)  # +
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Residuals differ between ranks, so every rank writes its own checkpoint.
    path = options.checkpoint.with_suffix(f".rank{rank}.pt")
    start = 0
    if options.resume:
        saved = torch.load(path)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        compression.load_state_dict(saved["compression"])  # +
        start = saved["step"]

    for step in range(start, start + options.steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        starts = torch.randint(len(data) - context - 1, (8,), generator=generator)
        windows = data[starts[:, None] + torch.arange(context + 1)].long()
        logits = model(windows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)

    torch.save(
        {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "compression": compression.state_dict(),  # +
            "step": start + options.steps,
        },
        path,
    )
    if options.trace:
        compression.trace(options.trace)  # +
    compression.print_report()  # +
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
