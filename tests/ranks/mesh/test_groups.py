"""Arguments ``group``: an axis of a mesh is its process group, and a mesh of several dimensions is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtcomm import moe
from dtcomm.collectives.groups import GroupOrMesh
from dtcomm.ddp import DDPState
from dtcomm.fsdp import ShardedOptimizer
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD

X, EXPERTS = torch.ones(4, 64), torch.tensor([0, 1, 0, 1])


def make_optimizer(group: GroupOrMesh) -> object:
    return ShardedOptimizer(nn.Linear(4, 4).named_parameters(), torch.optim.SGD, group=group, lr=0.1).group


#: Axis of a mesh → what takes its group, and returns the group that it uses.
TAKERS: list[tuple[str, Callable[[GroupOrMesh], object]]] = [
    ("dp", lambda group: DDPState(group=group).group),
    ("dp", make_optimizer),
    ("dp", lambda group: LocalSGD(nn.Linear(4, 4), group=group).group),
    ("ep", lambda group: moe.dispatch(X, EXPERTS, 2, group=group)[1].group),
    ("ep", lambda group: moe.dispatch_padded(X, EXPERTS, 2, 4, group=group)[1].group),
]


def take_meshes(rank: int, ranks: int) -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "one"))
    for axis, take in TAKERS:
        assert take(mesh["all"]) is mesh["all"].get_group()
        with pytest.raises(
            ValueError, match=rf"group: expected a mesh with one dimension, got 2: pass mesh\['{axis}'\]"
        ):
            take(mesh)


def test_an_axis_of_a_mesh_is_a_group() -> None:
    run_ranks(take_meshes, 2, fresh=True)
