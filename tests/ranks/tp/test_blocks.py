"""Tensor-parallel blocks compared to dense ones: forward, gradients, states, options, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtcomm import tp
from dtcomm.launch.ranks import run_ranks

WIDTH, HIDDEN, HEADS = 48, 96, 4


class DenseMLP(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        if gated:
            self.gate = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.silu(self.gate(x)) * self.up(x) if hasattr(self, "gate") else F.silu(self.up(x))
        y: torch.Tensor = self.down(inner)
        return y


class DenseAttention(nn.Module):
    def __init__(self, kv: int) -> None:
        super().__init__()
        each = WIDTH // HEADS
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, kv * each),
            nn.Linear(WIDTH, kv * each),
        )
        self.o = nn.Linear(WIDTH, WIDTH)
        self.kv = kv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (each.repeat_interleave(HEADS // self.kv, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
        y: torch.Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return y


def same(rank: int, ranks: int, which: str, options: dict[str, Any], tolerance: float) -> None:
    torch.manual_seed(2)
    dense: nn.Module = DenseMLP(which == "gated") if which in ("mlp", "gated") else DenseAttention(int(which))
    torch.manual_seed(2)
    block: nn.Module
    if which in ("mlp", "gated"):
        block = tp.ParallelMLP(WIDTH, HIDDEN, activation="silu", gated=which == "gated", **options)
    else:
        block = tp.ParallelAttention(WIDTH, HEADS, kv_heads=int(which), **options)
    # The same seed gives the dense module's shards; states are saved and loaded as dense ones.
    expected_state = dense.state_dict()
    full = tp.full_state_dict(block)
    assert full.keys() == expected_state.keys()
    assert all(torch.equal(full[name], expected_state[name]) for name in full)
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    mine = x.detach().clone().requires_grad_()
    expected, got = dense(x) + x, block(mine, mine)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * scale)
    with torch.no_grad():
        torch.testing.assert_close(block(mine, mine), expected, rtol=tolerance, atol=tolerance * scale)
    expected.square().sum().backward()
    got.square().sum().backward()
    scale = float(x.grad.abs().max())
    torch.testing.assert_close(mine.grad, x.grad, rtol=tolerance, atol=tolerance * scale)
    for name, parameter in block.named_parameters():
        layer, _, kind = name.rpartition(".")
        wanted = block.get_submodule(layer).shard_of(kind, dense.get_parameter(name).grad)
        torch.testing.assert_close(
            parameter.grad, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max() + 1)
        )
    changed = {name: tensor + 1 for name, tensor in expected_state.items()}
    block.load_state_dict(changed)
    assert all(torch.equal(tensor, changed[name]) for name, tensor in tp.full_state_dict(block).items())


@pytest.mark.parametrize("which", ["mlp", "gated", "4", "2"])
def test_uncompressed_blocks_are_the_dense_ones(which: str) -> None:
    run_ranks(same, 2, which, {}, 1e-5)


@pytest.mark.parametrize("which", ["gated", "2"])
def test_compressed_blocks_are_near(which: str) -> None:
    options = {"codec": "int8", "backward_codec": "int8", "algorithm": "two_shot_symmetric", "chunks": 2}
    run_ranks(same, 2, which, options, 0.05)


def refusals(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="heads: 3 is not divisible by the 2 ranks"):
        tp.ParallelAttention(48, 3)
    with pytest.raises(ValueError, match="kv_heads: 1 is not divisible by the 2 ranks"):
        tp.ParallelAttention(48, 4, kv_heads=1)
    with pytest.raises(ValueError, match="kv_heads: 4 heads are not divisible by 3"):
        tp.ParallelAttention(48, 4, kv_heads=3)
    with pytest.raises(ValueError, match="heads: the width, 48, is not divisible by 5"):
        tp.ParallelAttention(48, 5)
    with pytest.raises(ValueError, match="out_features: 49 is not divisible by the 2 ranks"):
        tp.ParallelMLP(48, 49)
    with pytest.raises(ValueError, match="activation: 'tan'; valid: gelu"):
        tp.ParallelMLP(48, 48, activation="tan")


def test_indivisible_sizes_are_refused() -> None:
    run_ranks(refusals, 2)
