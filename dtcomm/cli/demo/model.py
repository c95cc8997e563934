"""A small character-level GPT in plain torch, used by the demo, the benchmarks and the examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model; the default has one million parameters."""

    vocabulary: int
    context: int = 96
    layers: int = 4
    width: int = 144
    heads: int = 4


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a layer norm; maps [batch, length, width] to the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.before_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        # -1 heads: with tensor parallelism a rank has only a part of the heads.
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, -1, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(self.before_mlp(x))))
        return x


class GPT(nn.Module):
    """Maps symbols, int64 [batch, length], to logits [batch, length, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.symbols = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Residual branches are scaled down with depth, as in GPT-2. GPT-2's 0.02 would make so narrow a
                # model learn hundreds of steps later.
                added = name.endswith(("projection.weight", "down.weight"))
                std = shape.width**-0.5 / (2 * shape.layers) ** 0.5 if added else shape.width**-0.5
                nn.init.normal_(parameter, std=0.02 if name == "head.weight" else std)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.symbols(symbols) + self.positions(positions)
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per character."""
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
