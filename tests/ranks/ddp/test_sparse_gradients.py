"""Sparse gradients of embeddings: refused with advice, and both ways that the advice names work."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks

ROWS = 2000


def embedding_model(*, sparse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.EmbeddingBag(ROWS, 8, mode="sum", sparse=sparse), nn.Linear(8, 256), nn.Linear(256, 1)
    )


def backward(model: nn.Module, rank: int) -> None:
    rows = torch.randint(ROWS, (16, 4), generator=torch.Generator().manual_seed(rank))
    model(rows).square().mean().backward()


def refuse(rank: int, world_size: int) -> tuple[str, str]:
    model = DistributedDataParallel(embedding_model(sparse=True))
    ddp.compress(model, "topk:ratio=0.01")
    with pytest.raises(TypeError) as of_hook:
        backward(model, rank)
    with pytest.raises(ValueError) as of_call:
        dtcomm.all_reduce(torch.ones(4).to_sparse())
    return str(of_hook.value), str(of_call.value)


def test_the_refusals_say_what_to_do() -> None:
    for of_hook, of_call in run_ranks(refuse, 2):
        assert of_hook.startswith("bucket 1: 0.weight: torch.sparse_coo gradients cannot be compressed")
        assert "sparse=False" in of_hook and "_set_params_and_buffers_to_ignore_for_model" in of_hook
        assert "tensor.to_dense()" in of_call and "torch.distributed.all_reduce" in of_call


def average_in_both_ways(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embedding's averaged gradient: summed by torch beside the hook, and dense through the hook."""
    module = embedding_model(sparse=True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    model = DistributedDataParallel(module)
    ddp.compress(model, "int8", guard=None)
    backward(model, rank)
    gradient = module[0].weight.grad
    assert isinstance(gradient, torch.Tensor) and gradient.is_sparse
    dist.all_reduce(gradient)
    beside = gradient.to_dense() / world_size

    module = embedding_model(sparse=False)
    model = DistributedDataParallel(module)
    ddp.compress(model, "name=0.weight -> topk:ratio=0.1", guard=None)
    backward(model, rank)
    dense = module[0].weight.grad
    assert isinstance(dense, torch.Tensor)
    return beside, dense


@pytest.mark.slow
def test_both_ways_of_the_advice_average_the_gradient() -> None:
    (beside, dense), (other, _) = run_ranks(average_in_both_ways, 2)
    assert torch.equal(beside, other)
    assert beside.count_nonzero() > 500
    # A tenth of the elements is more than are not zero in a rank's gradient, so that topk loses the values' bits alone.
    torch.testing.assert_close(dense, beside, rtol=0.01, atol=1e-4)
