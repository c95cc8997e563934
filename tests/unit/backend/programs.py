"""Programs as users of torch write them, without naming a backend; each returns its results on this rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def _net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.BatchNorm1d(24), torch.nn.ReLU(), torch.nn.Linear(24, 5)
    )


def train(model: Any, rank: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x, y = torch.randn(8, 12, generator=inputs), torch.randint(0, 5, (8,), generator=inputs)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [_whole(parameter) for parameter in model.parameters()]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def ddp(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    return train(DistributedDataParallel(_net(), bucket_cap_mb=1), rank)


def ddp_static(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    """DDP with gradients as bucket views, unused parameters, uneven inputs and join."""
    model = DistributedDataParallel(_net(), gradient_as_bucket_view=True, find_unused_parameters=True)
    with model.join():
        for _ in range(2 + rank):
            model(
                torch.full((4, 12), float(rank + 1)).addcmul_(torch.eye(12)[:4], torch.ones(12))
            ).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def ddp_hooked(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    """DDP with torch's own hook, whose callback runs on the backend's future."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(_net())
    model.register_comm_hook(None, fp16_compress_hook)
    return train(model, rank)


def fsdp2(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    model = _net()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), rank)


def tensor_parallel(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 5))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
        with torch.no_grad():
            parameter += torch.arange(parameter.numel()).view(parameter.shape) * 1e-3
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, 0)


def dtensor(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    """A mesh of two dimensions if there are enough ranks, and redistributions between all placements."""
    shape = (2, world_size // 2) if world_size % 2 == 0 else (world_size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    sharded = distribute_tensor(torch.randn(9, 8), mesh, [Shard(0), Shard(1)])
    other = sharded.redistribute(placements=[Shard(1), Replicate()])
    partial = DTensor.from_local(torch.full((4, 4), float(rank)), mesh, [Partial(), Replicate()])
    product = sharded @ distribute_tensor(torch.ones(8, 3), mesh, [Replicate(), Shard(0)])
    return [
        _whole(tensor)
        for tensor in (sharded, other, partial.redistribute(placements=[Shard(0), Shard(1)]), product)
    ]


def checkpoints(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    """Save sharded checkpoints, synchronously and asynchronously, and load them into another model."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = fully_shard(_net(), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(torch.randn(8, 12)), torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()
    parameters, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": parameters, "optimizer": states}, checkpoint_id=Path(folder) / "now")
    saved = [_whole(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parameters, states = get_state_dict(model, optimizer)
    checkpoint.load({"model": parameters, "optimizer": states}, checkpoint_id=Path(folder) / "now")
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states)
    loaded = [_whole(parameter) for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(saved, loaded))
    return loaded


def objects(rank: int, world_size: int, folder: str) -> list[Any]:
    """Object collectives, also in subgroups, and the names of groups."""
    own = {"rank": rank, "text": "x" * (rank * 100)}
    gathered_all: list[Any] = [None] * world_size
    dist.all_gather_object(gathered_all, own)
    broadcast = [own if rank == 0 else None, rank if rank == 0 else None]
    dist.broadcast_object_list(broadcast, 0)
    gathered: list[Any] | None = [None] * world_size if rank == 1 else None
    dist.gather_object(own, gathered, 1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {i}" for i in range(world_size)] if rank == 0 else None, 0)
    assert scattered == [f"for {rank}"]
    assert rank != 1 or gathered == gathered_all
    if world_size == 2:
        if rank == 0:
            dist.send_object_list([{"a": 1}], 1)
        else:
            received: list[Any] = [None]
            dist.recv_object_list(received, 0)
            assert received == [{"a": 1}]
    mine_group, groups = dist.new_subgroups(1)
    assert dist.get_world_size(mine_group) == 1 and len(groups) == world_size
    all_ranks = dist.new_group(list(range(world_size)))
    gathered_again: list[Any] = [None] * world_size
    dist.all_gather_object(gathered_again, own, group=all_ranks)
    assert gathered_again == gathered_all
    dist.destroy_process_group(all_ranks)
    return gathered_all + broadcast


def functions(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    """Functional collectives, as DTensor and compiled code call them, eager and traced."""
    group = dist.group.WORLD
    ones = torch.full((4, 2), float(rank + 1))

    def program(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x, "sum", group)
        every = functional.all_gather_tensor(total * (rank + 1), 0, group)
        return functional.reduce_scatter_tensor(every, "sum", 0, group) + total

    results = [program(ones)]
    results.append(functional.all_gather_tensor(results[0] * (rank + 1), 0, group) + 0)
    results += functional.all_reduce_coalesced([ones, ones * 2], "max", group)
    several = [ones, ones[:2] * 5]
    results += functional.all_gather_into_tensor_coalesced(several, group)
    wide = [tensor.repeat(world_size, 1) for tensor in several]
    results += functional.reduce_scatter_tensor_coalesced(wide, "sum", [0, 0], group)
    results.append(functional.broadcast(ones, 0, group) + 0)
    splits = [1] * world_size
    exchanged = (
        functional.all_to_all_single(torch.arange(float(world_size)) + rank, splits, splits, group) + 0
    )
    assert torch.equal(exchanged, torch.arange(float(world_size)) + rank)
    with dist._coalescing_manager(async_ops=True) as manager:
        a, b = ones.clone(), ones.clone() * 3
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    return [*(tensor + 0 for tensor in results), a, b]


# Programs whose results are the same on all ranks.
AGREE = ("ddp", "ddp_hooked", "fsdp2", "tensor_parallel", "dtensor", "checkpoints", "objects")

PROGRAMS: dict[str, Callable[..., list[Any]]] = {
    program.__name__: program
    for program in (
        ddp,
        ddp_static,
        ddp_hooked,
        fsdp2,
        tensor_parallel,
        dtensor,
        checkpoints,
        objects,
        functions,
    )
}
