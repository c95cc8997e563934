"""Tensor-parallel layers compared to dense ones: forward, gradients, states, options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from dtcomm import tp
from dtcomm.launch.ranks import run_ranks
from dtcomm.tp import functional
from tests.support.rank_tests import on_ranks

IN, OUT = 24, 36


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def shard(x: torch.Tensor, rank: int, ranks: int, dim: int = -1) -> torch.Tensor:
    return x.chunk(ranks, dim)[rank]


def compare_linear_pair(rank: int, ranks: int, options: dict[str, Any], tolerance: float) -> None:
    """Compare a column-parallel layer followed by a row-parallel one to two dense layers."""
    torch.manual_seed(3)
    up, down = nn.Linear(IN, OUT), nn.Linear(OUT, IN)
    torch.manual_seed(3)
    common_options = dict(options)
    chunks = common_options.pop("chunks", 1)
    column = tp.ColumnParallelLinear(IN, OUT, **common_options)
    row = tp.RowParallelLinear(OUT, IN, chunks=chunks, **common_options)
    # The same seed gives the dense layers' shards.
    assert torch.equal(column.weight, shard(up.weight, rank, ranks, 0))
    assert torch.equal(row.weight, shard(down.weight, rank, ranks, 1))
    sequence = bool(options.get("sequence_parallel"))
    x = torch.randn(2, 6, IN, generator=torch.Generator().manual_seed(1))
    local_x = shard(x, rank, ranks, 1) if sequence else x
    local_x = local_x.clone().requires_grad_()
    x.requires_grad_()
    expected = down(torch.relu(up(x)))
    actual = row(torch.relu(column(local_x)))
    assert_close(actual, shard(expected, rank, ranks, 1) if sequence else expected, tolerance)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * weights).sum().backward()
    (actual * (shard(weights, rank, ranks, 1) if sequence else weights)).sum().backward()
    assert_close(local_x.grad, shard(x.grad, rank, ranks, 1) if sequence else x.grad, tolerance)
    assert_close(column.weight.grad, shard(up.weight.grad, rank, ranks, 0), tolerance)
    assert_close(row.weight.grad, shard(down.weight.grad, rank, ranks, 1), tolerance)
    if not sequence:  # with sequence parallelism the bias sees this rank's tokens only
        assert_close(row.bias.grad, down.bias.grad, tolerance)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"chunks": 4}], ids=str)
def test_uncompressed_layers_equal_dense_ones(options: dict[str, Any], ranks: int) -> None:
    run_ranks(compare_linear_pair, ranks, options, 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "int8", "backward_codec": "int8"},
        {"codec": "fp16", "backward_codec": "bf16", "sequence_parallel": True},
        {"codec": "int8", "algorithm": "one_shot", "chunks": 3},
    ],
    ids=str,
)
def test_compressed_layers_are_close_to_dense_ones(options: dict[str, Any]) -> None:
    run_ranks(compare_linear_pair, 2, options, 0.05)


@on_ranks(2)
def test_gathered_output_and_split_input(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    column = tp.ColumnParallelLinear(IN, OUT, gather_output=True)
    row = tp.RowParallelLinear(IN, OUT, bias=False, input_is_parallel=False)
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1), requires_grad=True)
    full = column.full_state_dict()
    assert_close(column(x), nn.functional.linear(x, full["weight"], full["bias"]))
    expected = nn.functional.linear(x, row.full_state_dict()["weight"])
    assert_close(row(x), expected)
    (grad,) = torch.autograd.grad(row(x).square().sum(), x)
    (dense,) = torch.autograd.grad(expected.square().sum(), x)
    assert_close(grad, dense)
    assert row(x[:0]).shape == (0, OUT)


@on_ranks(3)
def test_states_of_dense_layers_load_and_save(rank: int, ranks: int) -> None:
    """Load dense states and shards, save dense states; a wrong shape is refused by name."""
    torch.manual_seed(rank)  # ranks start differently
    dense = nn.Linear(IN, OUT)
    state = {
        name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
        for name, tensor in dense.state_dict().items()
    }
    for layer in (tp.ColumnParallelLinear(IN, OUT), tp.RowParallelLinear(IN, OUT)):
        layer.load_state_dict(state)
        gathered = layer.full_state_dict()
        assert gathered.keys() == state.keys() and all(
            torch.equal(gathered[name], state[name]) for name in state
        )
        shards = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        layer.load_state_dict(shards)
        assert all(torch.equal(a, b) for a, b in zip(shards.values(), layer.state_dict().values()))
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            layer.load_state_dict({**state, "weight": torch.zeros(7, 7)})


@on_ranks(2)
def test_embedding(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(30, 16)
    torch.manual_seed(0)
    parallel = tp.VocabParallelEmbedding(30, 16)
    tokens = torch.arange(40).view(4, 10) % 30
    assert torch.equal(parallel(tokens), dense(tokens))
    weights = torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(2))
    (dense(tokens) * weights).sum().backward()
    (parallel(tokens) * weights).sum().backward()
    assert_close(parallel.weight.grad, shard(dense.weight.grad, rank, ranks, 0))
    with pytest.raises(IndexError, match="expected 0 to 29"):
        parallel(torch.tensor([30]))


@on_ranks(2)
def test_the_pairs_are_conjugate(rank: int, ranks: int) -> None:
    """Check numerical gradients, with the same random numbers on all ranks."""
    comm = tp.CommConfig.of()
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    # Compositions whose gradient is correct per rank: every rank perturbs the same element of the same tensor.
    assert gradcheck(lambda t: functional.split_to_ranks(functional.gather_from_ranks(t, comm), comm), x)
    assert gradcheck(
        lambda t: functional.gather_from_ranks(functional.split_to_ranks(t, comm, 1), comm, 1), x
    )
    assert gradcheck(lambda t: functional.reduce_from_ranks(functional.copy_to_ranks(t, comm), comm), x)
    assert gradcheck(
        lambda t: functional.all_gather_from_ranks(functional.reduce_scatter_to_ranks(t, comm, 1), comm, 1), x
    )


@on_ranks(2)
def test_invalid_arguments_are_refused_with_the_reason(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="out_features: 35 is not divisible by the 2 ranks"):
        tp.ColumnParallelLinear(IN, 35)
    with pytest.raises(ValueError, match="in_features: 25 is not divisible"):
        tp.RowParallelLinear(25, OUT)
    with pytest.raises(ValueError, match="chunks: 0; valid: 1 or more"):
        tp.RowParallelLinear(IN, OUT, chunks=0)
    with pytest.raises(ValueError, match="gather_output: not valid with sequence_parallel"):
        tp.ColumnParallelLinear(IN, OUT, gather_output=True, sequence_parallel=True)
    with pytest.raises(ValueError, match="unknown codec"):
        tp.RowParallelLinear(IN, OUT, codec="int9")
    with pytest.raises(ValueError, match="dim 0: 5 is not divisible by the 2 ranks"):
        functional.split_to_ranks(torch.zeros(5, 2), tp.CommConfig.of(), 0)
