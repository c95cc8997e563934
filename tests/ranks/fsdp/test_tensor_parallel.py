"""FSDP of tensor-parallel models: parameters that all tensor-parallel ranks have stay equal on them, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dtcomm
from dtcomm import fsdp
from dtcomm.launch.ranks import run_ranks

WIDTH = 24  # rows of a few elements: blocks of any codec hold elements of several parameters
STEPS = 12
CODECS: dict[str, dict[str, Any]] = {
    "int8": {"gradients": "int8", "parameters": "int8"},
    "int8, stochastic": {"gradients": "int8:round=stochastic", "parameters": "int8:round=stochastic"},
    "int4, feedback": {"gradients": "ef:int4", "parameters": "int8", "residual": "int8", "sample_every": 2},
    "loco": {"gradients": "loco:int4:rotate=hadamard", "parameters": "delta:int4"},
}
REPLICATED = ("norm.weight", "norm.bias", "down.bias")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.uses_norm = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) if self.uses_norm else x
        out: torch.Tensor = x + self.down(torch.relu(self.up(y)))
        return out


def make_model(mesh: DeviceMesh, style: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if style == "torch":
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        dtcomm.tp.compress(model, mesh["tp"], "int8", {"*.up": "column", "*.down": "row"}, latency=False)
    for block in model:
        fully_shard(block, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp"])


def require_equal(tensor: torch.Tensor, mesh: DeviceMesh, what: str) -> None:
    tensors = [torch.empty_like(tensor) for _ in range(mesh.size())]
    dist.all_gather(tensors, tensor, group=mesh.get_group())
    assert all(torch.equal(other, tensor) for other in tensors), what


def train_replicas(rank: int, ranks: int, style: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for name, options in CODECS.items():
        model = make_model(mesh, style)
        state = fsdp.compress(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(mesh["fsdp"].get_local_rank())
        for step in range(STEPS):
            x = torch.randn(8, WIDTH, generator=generator)
            y = model(x)
            require_equal(y.detach(), mesh["tp"], f"{name}: output in step {step}")
            (y - x.roll(1, -1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for path, parameter in model.named_parameters():
                if path.endswith(REPLICATED):
                    shard = parameter._local_tensor.detach()
                    require_equal(shard, mesh["tp"], f"{name}: {path} in step {step}")
        report = state.report()
        assert 0 < report.wire_bytes < report.plain_bytes and not report.uncompressed
        for kind in ("gradients", "parameters"):
            assert report.modules["0, replicated"][kind].calls == report.modules["0"][kind].calls
        # Without some of its gradients it is unknown what lies where in the flat one.
        model[0].uses_norm = False
        model(x).square().mean().backward()
        assert "some parameters have no gradient" in state.report().modules["0"]["gradients"].reason
        require_equal(model[0].down.bias.grad._local_tensor, mesh["tp"], f"{name}: uncompressed gradient")
        state.detach()


@pytest.mark.parametrize("style", ["torch", "dtcomm"])
def test_replicated_parameters_stay_equal(style: str) -> None:
    run_ranks(train_replicas, 4, style, fresh=True)
