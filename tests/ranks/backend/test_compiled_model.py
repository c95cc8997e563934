"""DDP models under torch.compile, on backend "dtcomm" and with the compression hook, train as uncompiled ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks

STEPS = 3


def train(rank: int, compiled: bool, spec: str, static_graph: bool, optimizer: str) -> list[torch.Tensor]:
    """Return the gradients of every step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    model = DistributedDataParallel(net, static_graph=static_graph, bucket_cap_mb=1)  # type: ignore[call-arg]
    if spec:
        ddp.compress(model, spec)
    torch._dynamo.config.optimize_ddp = optimizer
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    gradients = []
    for step in range(STEPS):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        forward(torch.randn(4, 512, generator=generator)).square().sum().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
    return gradients


def compare(rank: int, world_size: int, spec: str) -> list[str]:
    """Return the settings in which the gradients differ from those of the model that is not compiled."""
    different = []
    for static_graph in (False, True):
        expected = train(rank, False, spec, static_graph, "ddp_optimizer")
        for optimizer in ("ddp_optimizer", "no_optimization"):
            gradients = train(rank, True, spec, static_graph, optimizer)
            if not all(map(torch.equal, gradients, expected)):
                different.append(f"static_graph={static_graph}, optimize_ddp={optimizer}")
    # Collectives of a graph break inside the model.
    total = torch.compile(lambda x: dist.all_reduce(x), backend="aot_eager")
    value = torch.ones(4)
    total(value)
    assert torch.equal(value, torch.full((4,), float(world_size)))
    return different


@pytest.mark.parametrize(
    ("backend", "spec"), [("dtcomm", ""), ("dtcomm", "int8"), ("gloo", "powersgd:rank=2")]
)
def test_a_compiled_model_has_the_gradients_of_the_model(backend: str, spec: str) -> None:
    assert run_ranks(compare, 2, spec, backend=backend, timeout=600) == [[], []]
