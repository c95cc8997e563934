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


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train_in_processes(rank: int, ranks: int, method: str, hosts: int) -> dict[str, torch.Tensor]:
    if hosts > 1:
        os.environ["DTCOMM_HOST_ID"] = f"host {rank * hosts // ranks}"
    model = sharded(init_device_mesh("cpu", (ranks,)))
    state = fsdp.compress(model, METHODS[method].gradients, METHODS[method].parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    for name, by_kind in state.report().modules.items():
        # Shards of the root module's 170 elements may be smaller than a block.
        assert name == "" or not any(traffic.reason for traffic in by_kind.values())
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def train_in_one_thread(ranks: int, method: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    shards = Shards(model, ["blocks.0", "blocks.1"], METHODS[method], ranks)
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(list(exact.values()), lr=0.1)
    for step in range(STEPS):
        for name, value in shards.gather(exact).items():
            model.get_parameter(name).data.copy_(value)
        gradients = []
        for rank in range(ranks):
            loss = model(batch(rank, step)).square().mean()
            gradients.append(
                dict(zip(exact, torch.autograd.grad(loss, list(model.parameters())), strict=True))
            )
        for name, mean in shards.scatter(gradients).items():
            exact[name].grad = mean
        optimizer.step()
    return exact


@pytest.mark.parametrize(
    ("method", "ranks", "hosts"),
    [("int8, fp8", 3, 1), ("LoCo", 2, 1), ("ZeRO++", 4, 2), ("SDP4Bit", 4, 2)],
)
def test_ranks_in_one_thread_compute_the_bits_of_processes(method: str, ranks: int, hosts: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on ranks: the number of threads changes sums over a batch
    try:
        expected = train_in_one_thread(ranks, method)
    finally:
        torch.set_num_threads(threads)
    for parameters in run_ranks(train_in_processes, ranks, method, hosts):
        for name, value in expected.items():
            assert torch.equal(parameters[name], value), (name, float((parameters[name] - value).abs().max()))
