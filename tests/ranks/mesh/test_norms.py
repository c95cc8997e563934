"""Norms of gradients on meshes, and axes that do not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp, tp
from dtcomm.launch.ranks import run_ranks
from dtcomm.mesh import clip_grad_norm_, flatten_axes, make_mesh
from tests.support.rank_tests import on_ranks

WIDTH = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def reference(order: float, max_norm: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the norm of two models behind each other in one process, and the clipped gradients."""
    model = nn.Sequential(Model(), Model())
    model(inputs()).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=order)
    return float(norm), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


#: Kind of model → the axes of its mesh.
MESHES = {
    "layers": {"fsdp": 2, "tp": 2},
    "styles": {"fsdp": 2, "tp": 2},
    "stages": {"pp": 2, "tp": 2},
    "replicated layers": {"dp": 2, "tp": 2},
    "replicated stages": {"pp": 2, "dp": 2, "tp": 2},
}


def compare(rank: int, ranks: int, kind: str, order: float, max_norm: float) -> None:
    mesh = make_mesh(**MESHES[kind])
    expected_norm, expected = reference(order, max_norm)
    model = nn.Sequential(Model(), Model())
    if kind == "styles":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for part in model:
            parallelize_module(part, mesh["tp"], plan)
    else:
        tp.compress(model, mesh["tp"], "none", {"*.up": "column", "*.down": "row"}, latency=False)
    wrapped: nn.Module = model
    if kind.startswith("replicated"):
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        ddp.compress(wrapped, "none")
    elif kind != "stages":
        fully_shard(model, mesh=mesh["fsdp"])
    wrapped(inputs()).square().sum().backward()
    parts: Any = wrapped
    sharded = None
    prefix = ""
    if kind.endswith("stages"):  # each rank has one of the two models
        own = mesh["pp"].get_local_rank()
        parts, sharded, prefix = [model[own]], {"*": mesh["pp"]}, f"{own}."
    norm = clip_grad_norm_(parts, max_norm, sharded=sharded, norm_type=order)
    assert float(norm) == pytest.approx(expected_norm, rel=1e-5)
    module = parts[0] if kind.endswith("stages") else model
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        whole = expected[prefix + name]
        owner = module.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, tp.ColumnParallelLinear | tp.RowParallelLinear):
            whole = owner.shard_of(name.rpartition(".")[2], whole)
        torch.testing.assert_close(gradient, whole, msg=name)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if kind.startswith("replicated") else [])
        for kind in MESHES
    ],
)
def test_clipping_is_that_of_one_process(kind: str) -> None:
    run_ranks(compare, math.prod(MESHES[kind].values()), kind, 2.0, 0.5, fresh=True)


@on_ranks(2)
def test_other_norms_experts_and_wrong_arguments(rank: int, ranks: int) -> None:
    mesh = make_mesh(ep=2)
    model = nn.Linear(3, 1, bias=False)
    model.experts = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[1.0, -2.0, 2.0]])
    model.experts.weight.grad = torch.tensor([[3.0, float(rank)]])
    sharded = {"experts.*": mesh["ep"]}
    total = math.sqrt(9 + 9 + 9 + 1)
    assert float(clip_grad_norm_(model, 100.0, sharded=sharded)) == pytest.approx(total)
    assert model.weight.grad.tolist() == [[1.0, -2.0, 2.0]]
    assert float(clip_grad_norm_(model, 1.0, sharded=sharded, norm_type=math.inf)) == 3.0
    assert model.weight.grad[0, 2].item() == pytest.approx(2 / 3)
    # One rank has no gradient of its expert: the others must not wait for it.
    if rank == 0:
        model.experts.weight.grad = None
    norm = clip_grad_norm_(model, 100.0, sharded=sharded)
    assert float(norm) == pytest.approx(math.sqrt(9 + 9 + 1) / 3, rel=1e-5)
    with pytest.raises(ValueError, match="max_norm=0: expected a positive number"):
        clip_grad_norm_(model, 0)
    with pytest.raises(ValueError, match=r"sharded\['\*'\]: expected a mesh with one dimension, got 6"):
        clip_grad_norm_(model, 1.0, sharded={"*": mesh})
    with pytest.raises(
        TypeError, match=r"sharded\['\*'\]: expected a process group, a device mesh or None, got str"
    ):
        clip_grad_norm_(model, 1.0, sharded={"*": "pp"})  # type: ignore[dict-item]
    assert flatten_axes(mesh, "dp", "ep").size() == 2
    styled = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(styled, mesh["ep"], {"0": ColwiseParallel()})
    _pre_dp_module_transform(styled)
    styled(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"modules: 0.weight is a DTensor and no longer a parameter"):
        clip_grad_norm_(styled, 1.0)
    with pytest.raises(
        ValueError, match=r"names: \('ep', 'dp'\); valid: some of pp, dp, fsdp, ep, cp, tp, in this"
    ):
        flatten_axes(mesh, "ep", "dp")
