"""topk:scope=tensor in collectives and in the DDP hook, over shared memory and over Gloo."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm.launch.ranks import run_ranks

SPEC = "topk:ratio=0.05,values=fp32,scope=tensor"
ENVIRONMENTS = [{}, {"DTCOMM_RUNTIME": "process_group"}]


def rank_input(rank: int) -> torch.Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(rank))


def reduce(rank: int, n: int) -> list[torch.Tensor]:
    x, residual = rank_input(rank), torch.zeros(20_000)
    dtcomm.all_reduce(x, codec=SPEC, algorithm="one_shot", residual=residual)
    y = rank_input(rank)
    dtcomm.all_reduce(y, codec=SPEC)
    return [x, residual, y]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=["memory", "gloo"])
def test_a_sum_has_the_largest_elements_of_each_tensor(environment: dict[str, str]) -> None:
    results = run_ranks(reduce, 2, fresh=True, env=environment)
    sent = [torch.zeros(20_000) for _ in range(2)]
    for rank, kept in enumerate(sent):
        x = rank_input(rank)
        largest = x.abs().topk(1000).indices
        kept[largest] = x[largest]
        assert torch.equal(results[rank][1], x - kept)
    for total, _, default in results:
        assert torch.equal(total, sent[0] + sent[1])
        assert torch.equal(default, results[0][2])


def train(rank: int, n: int) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(1)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    )
    dtcomm.ddp.compress(model, "topk:ratio=0.05,scope=tensor")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [parameter.detach() for parameter in model.parameters()]


def test_the_hook_trains_with_it() -> None:
    (losses, ours), (_, theirs) = run_ranks(train, 2, fresh=True)
    assert losses[-1] < 0.75 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
