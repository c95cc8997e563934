"""Tensor-parallel blocks compared to dense ones: forward, gradients, states, options, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtcomm import tp
from dtcomm.launch.ranks import run_ranks
from examples.tp_blocks import ParallelAttention, ParallelMLP
from tests.support.rank_tests import on_ranks

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
        head_dim = WIDTH // HEADS
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, kv * head_dim),
            nn.Linear(WIDTH, kv * head_dim),
        )
        self.o = nn.Linear(WIDTH, WIDTH)
        self.kv = kv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (heads.repeat_interleave(HEADS // self.kv, 1) for heads in (k, v))
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
        y: torch.Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return y


def compare_to_dense(rank: int, ranks: int, kind: str, options: dict[str, Any], tolerance: float) -> None:
    torch.manual_seed(2)
    dense: nn.Module = DenseMLP(kind == "gated") if kind in ("mlp", "gated") else DenseAttention(int(kind))
    torch.manual_seed(2)
    block: nn.Module
    if kind in ("mlp", "gated"):
        block = ParallelMLP(WIDTH, HIDDEN, activation="silu", gated=kind == "gated", **options)
    else:
        block = ParallelAttention(WIDTH, HEADS, kv_heads=int(kind), **options)
    # The same seed gives the dense module's shards; states are saved and loaded as dense ones.
    expected_state = dense.state_dict()
    full = tp.full_state_dict(block)
    assert full.keys() == expected_state.keys()
    assert all(torch.equal(full[name], expected_state[name]) for name in full)
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    parallel_x = x.detach().clone().requires_grad_()
    expected, actual = dense(x) + x, block(parallel_x, parallel_x)

    def close(actual: torch.Tensor, expected: torch.Tensor, more: float = 0.0) -> None:
        scale = float(expected.detach().abs().max() + more)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)

    close(actual, expected)
    with torch.no_grad():
        close(block(parallel_x, parallel_x), expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    close(parallel_x.grad, x.grad)
    for name, parameter in block.named_parameters():
        layer, _, parameter_name = name.rpartition(".")
        gradient = dense.get_parameter(name).grad
        close(parameter.grad, block.get_submodule(layer).shard_of(parameter_name, gradient), more=1)
    changed_state = {name: tensor + 1 for name, tensor in expected_state.items()}
    block.load_state_dict(changed_state)
    assert all(torch.equal(tensor, changed_state[name]) for name, tensor in tp.full_state_dict(block).items())


@pytest.mark.parametrize("kind", ["mlp", "gated", "4", "2"])
def test_uncompressed_blocks_equal_dense_ones(kind: str) -> None:
    run_ranks(compare_to_dense, 2, kind, {}, 1e-5)


@pytest.mark.parametrize("kind", ["gated", "2"])
def test_compressed_blocks_are_close_to_dense_ones(kind: str) -> None:
    options = {"codec": "int8", "backward_codec": "int8", "algorithm": "two_shot_symmetric", "chunks": 2}
    run_ranks(compare_to_dense, 2, kind, options, 0.05)


@on_ranks(2)
def test_indivisible_sizes_are_refused(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="heads: 3 is not divisible by the 2 ranks"):
        ParallelAttention(48, 3)
    with pytest.raises(ValueError, match="kv_heads: 1 is not divisible by the 2 ranks"):
        ParallelAttention(48, 4, kv_heads=1)
    with pytest.raises(ValueError, match="kv_heads: 4 heads are not divisible by 3"):
        ParallelAttention(48, 4, kv_heads=3)
    with pytest.raises(ValueError, match="heads: the width, 48, is not divisible by 5"):
        ParallelAttention(48, 5)
    with pytest.raises(ValueError, match="out_features: 49 is not divisible by the 2 ranks"):
        ParallelMLP(48, 49)
    with pytest.raises(ValueError, match="activation: 'tan'; valid: gelu"):
        ParallelMLP(48, 48, activation="tan")
