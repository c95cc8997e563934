"""DDP of tensor-parallel models: guard and "auto" decide alike on all ranks that have copies of a parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm import ddp
from dtcomm.compress.checkpoint import seal
from dtcomm.compress.guard import CompressionHarmful
from dtcomm.ddp.auto import ProcessGroupConsensus
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD

WIDTH = 48
REPLICATED = ("norm.weight", "norm.bias", "down.bias")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def make_model(mesh: DeviceMesh, style: str = "dtcomm") -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if style == "torch":
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        _pre_dp_module_transform(model)
    else:
        dtcomm.tp.compress(model, mesh["tp"], "none", {"*.up": "column", "*.down": "row"}, latency=False)
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group(), bucket_cap_mb=0.01)


def step_of(model: nn.Module, mesh: DeviceMesh, step: int) -> None:
    x = torch.randn(
        8, WIDTH, generator=torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
    )
    (model(x) - x.roll(1, -1)).square().mean().backward()


def require_equal(tensor: torch.Tensor, mesh: DeviceMesh, what: str) -> None:
    tensors = [torch.empty_like(tensor) for _ in range(mesh.size())]
    dist.all_gather(tensors, tensor, group=mesh.get_group())
    assert all(torch.equal(other, tensor) for other in tensors), what


def spoil_gradient(model: DistributedDataParallel, spoil: Any) -> None:
    """Change the gradient of a shard before DDP sees it."""
    shard = model.module[0].up.weight
    shard.register_hook(spoil)


def train_with_a_bad_shard(rank: int, ranks: int, action: str) -> tuple[list[Any], set[str], str]:
    """Train where the gradients of one shard are infinite, of global rank 3 alone."""
    mesh = dtcomm.mesh.make_mesh(dp=2, tp=2)
    model = make_model(mesh)
    guard = ddp.Guard(nonfinite=2, on_nonfinite=action, steps=3)
    state = ddp.compress(model, "int8:round=stochastic", guard=guard)
    step_number = 0
    if rank == 3:
        spoil_gradient(model, lambda gradient: gradient * (torch.inf if step_number < 3 else 1))
    codecs: set[str] = set()
    for step_number in range(9):
        model.zero_grad()
        try:
            step_of(model, mesh, step_number)
        except CompressionHarmful as error:
            return list(state.events), codecs, f"step {step_number}: {error.cause} of rank {error.rank}"
        for name, parameter in model.module.named_parameters():
            if name.endswith(REPLICATED):
                require_equal(parameter.grad, mesh["tp"], f"{name} in step {step_number}")
        codecs |= {f"{step_number}: {row.codec}" for row in state.report().by_message}
    return list(state.events), codecs, ""


@pytest.mark.parametrize("action", ["uncompressed", "error"])
def test_all_ranks_of_the_mesh_decide_alike(action: str) -> None:
    results = run_ranks(train_with_a_bad_shard, 4, action, fresh=True)
    assert all(result == results[0] for result in results)
    events, _, stopped = results[0]
    assert events and {event.rank for event in events} == {3}
    assert {event.kind for event in events} == {"nonfinite"}
    assert stopped == ("step 3: gradients of rank 3" if action == "error" else "")


def train_with_a_stale_residual(rank: int, ranks: int, style: str) -> list[tuple[int, str, str]]:
    mesh = dtcomm.mesh.make_mesh(dp=2, tp=2)
    model = make_model(mesh, style)
    state = ddp.compress(model, "int8", feedback=True, sample_every=2)
    for step in range(2):
        step_of(model, mesh, step)
    saved = state.state_dict()
    if mesh["tp"].get_local_rank() == 1:
        saved["residuals"]["0.up.weight"].normal_(generator=torch.Generator().manual_seed(0)).mul_(1e4)
    state.load_state_dict(seal(saved))
    for step in range(2, 6):
        model.zero_grad()
        step_of(model, mesh, step)
    return [(event.step, event.kind, event.name) for event in state.events]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["dtcomm", "torch"])
def test_what_one_shard_measures_counts_for_all(style: str) -> None:
    results = run_ranks(train_with_a_stale_residual, 4, style, fresh=True)
    assert results[0] and all(result == results[0] for result in results)
    assert ("residual", "0.up.weight") in {(kind, name) for _, kind, name in results[0]}


def agree(rank: int, ranks: int) -> tuple[list[float], bool]:
    mesh = dtcomm.mesh.make_mesh(dp=2, tp=2)
    consensus = ProcessGroupConsensus(mesh["dp"].get_group())
    consensus.agreeing_groups = [mesh["tp"].get_group()]
    return consensus.max([float(rank), -float(rank)]), consensus.in_memory()


@pytest.mark.slow
def test_auto_measures_over_the_mesh() -> None:
    assert run_ranks(agree, 4, fresh=True) == [([3.0, 0.0], True)] * 4


def average_a_bad_shard(rank: int, ranks: int) -> None:
    mesh = dtcomm.mesh.make_mesh(dp=2, tp=2)
    torch.manual_seed(0)
    model = Block()
    dtcomm.tp.compress(model, mesh["tp"], "none", {"up": "column", "down": "row"}, latency=False)
    local = LocalSGD(model, every=1, codec="int8", group=mesh["dp"].get_group())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
        if rank == 3:
            model.up.weight[0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="a rank sent NaN or Inf"):
        local.step()
    # No rank of the mesh has moved, those that have another shard neither.
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.slow
def test_local_sgd_drops_an_average_on_all_ranks() -> None:
    run_ranks(average_a_bad_shard, 4, fresh=True)
