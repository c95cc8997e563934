"""Run DDP, FSDP2, DTensor tensor parallelism and sharded checkpoints on a chosen backend.

    torchrun --nproc-per-node 2 examples/backend_everything.py
    torchrun --nproc-per-node 2 examples/backend_everything.py --backend gloo

This is plain PyTorch; only the name of the backend differs. Each part prints its last loss, which does not depend on
the backend, and its time. At the end dtcomm is imported to print a report of the backend's operations.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, BATCH = 256, 10, 32


def network() -> nn.Sequential:
    """Return the network, with the same weights on every rank."""
    torch.manual_seed(0)
    wide = 4 * WIDTH
    return nn.Sequential(
        nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, CLASSES)
    )


def train(model: nn.Module, seed: int, steps: int) -> float:
    """Train and return the last loss; with ``seed`` = rank, each rank has its own data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        loss = functional.cross_entropy(model(inputs), inputs[:, :CLASSES].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def ddp(mesh: DeviceMesh, steps: int) -> float:
    """DDP: gradients are averaged in buckets during the backward pass."""
    return train(DistributedDataParallel(network()), dist.get_rank(), steps)


def fsdp2(mesh: DeviceMesh, steps: int) -> float:
    """FSDP2: sharded parameters are gathered before each layer, and gradients are reduce-scattered after it."""
    return train(sharded(mesh), dist.get_rank(), steps)


def sharded(mesh: DeviceMesh) -> nn.Module:
    """Return the network wrapped by fully_shard."""
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def dtensor(mesh: DeviceMesh, steps: int) -> float:
    """Tensor parallelism: weights are DTensors split by columns and rows, and activations are summed."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return train(parallelize_module(network(), mesh, plan), 0, steps)


def checkpoints(mesh: DeviceMesh, steps: int) -> float:
    """Train half the steps, save on all ranks, load into another model and continue training."""
    folders: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    model, other = sharded(mesh), sharded(mesh)
    train(model, dist.get_rank(), steps // 2)
    folder = str(folders[0])
    saved = {"model": get_state_dict(model, ())[0]}
    checkpoint.save(saved, checkpoint_id=folder)
    loaded = {"model": get_state_dict(other, ())[0]}
    checkpoint.load(loaded, checkpoint_id=folder)
    set_state_dict(other, (), model_state_dict=loaded["model"], optim_state_dict={})
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return train(other, dist.get_rank() + 100, steps - steps // 2)


PARTS: tuple[Callable[[DeviceMesh, int], float], ...] = (ddp, fsdp2, dtensor, checkpoints)


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="dtcomm")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in PARTS:
        start = time.perf_counter()
        loss = part(mesh, options.steps)
        if dist.get_rank() == 0:
            print(f"{part.__name__:12} loss {loss:.6f}  {time.perf_counter() - start:6.2f} s", flush=True)
    if dist.get_rank() == 0 and options.backend == "dtcomm":
        import dtcomm.backend  # only for the report

        print(dtcomm.backend.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
