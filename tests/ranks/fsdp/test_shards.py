"""The convergence benchmark's emulation in one thread has the bits of FSDP in processes."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from bench.training.shards import METHODS, Shards
from dtcomm import fsdp
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import WIDTH, Net, sharded

STEPS = 3


def given(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def in_processes(rank: int, ranks: int, method: str, hosts: int) -> dict[str, torch.Tensor]:
    if hosts > 1:
        os.environ["DTCOMM_HOST_ID"] = f"host {rank * hosts // ranks}"
    model = sharded(init_device_mesh("cpu", (ranks,)))
    state = fsdp.compress(model, METHODS[method].gradients, METHODS[method].parameters)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimiser.zero_grad()
        model(given(rank, step)).square().mean().backward()
        optimiser.step()
    assert not [
        t.uncompressed_reason
        for kinds in state.report().modules.values()
        for t in kinds.values()
        if t.uncompressed_reason
    ]
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def in_one_thread(ranks: int, method: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    shards = Shards(model, ["blocks.0", "blocks.1"], METHODS[method], ranks)
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimiser = torch.optim.SGD(list(exact.values()), lr=0.1)
    for step in range(STEPS):
        for name, value in shards.gather(exact).items():
            model.get_parameter(name).data.copy_(value)
        gradients = []
        for rank in range(ranks):
            loss = model(given(rank, step)).square().mean()
            gradients.append(
                dict(zip(exact, torch.autograd.grad(loss, list(model.parameters())), strict=True))
            )
        for name, mean in shards.scatter(gradients).items():
            exact[name].grad = mean
        optimiser.step()
    return exact


@pytest.mark.parametrize(
    ("method", "ranks", "hosts"),
    [("int8, fp8", 3, 1), ("LoCo", 2, 1), ("ZeRO++", 4, 2), ("SDP4Bit", 4, 2)],
)
def test_ranks_in_one_thread_end_with_the_bits_of_processes(method: str, ranks: int, hosts: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on ranks: the number of threads changes sums over a batch
    try:
        expected = in_one_thread(ranks, method)
    finally:
        torch.set_num_threads(threads)
    for mine in run_ranks(in_processes, ranks, method, hosts):
        for name, value in expected.items():
            assert torch.equal(mine[name], value), (name, float((mine[name] - value).abs().max()))
