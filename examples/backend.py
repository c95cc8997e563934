"""DDP, FSDP2, DTensor tensor parallelism and a sharded checkpoint on the backend "dtcomm", or on another one.

    torchrun --nproc-per-node 2 examples/backend.py
    torchrun --nproc-per-node 2 examples/backend.py gloo

It is plain PyTorch; only the backend's name differs, and the last line. Losses do not depend on the backend, times do.
"""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dtcomm.backend  # for the report, and where dtcomm is not installed but on PYTHONPATH

device = torch.device("cpu")  # on GPUs: torch.device("cuda", int(os.environ["LOCAL_RANK"])); NCCL serves them
dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "dtcomm")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers).to(device)


def sharded() -> nn.Module:
    model = network()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(name: str, model: nn.Module, seed: int) -> None:
    start = time.perf_counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(30):
        x = torch.randn(32, 256, generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"{name:16} loss {loss.item():.5f}  {time.perf_counter() - start:6.2f} s", flush=True)


rank = dist.get_rank()
train("DDP", DistributedDataParallel(network()), seed=rank)  # other data on each rank
train("FSDP2", model := sharded(), seed=rank)
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
train("tensor parallel", parallelize_module(network(), mesh, plan), seed=0)  # the same data on all ranks

folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
checkpoint.save(get_model_state_dict(model), checkpoint_id=folder[0])
weights = get_model_state_dict(other := sharded())
checkpoint.load(weights, checkpoint_id=folder[0])
set_model_state_dict(other, weights)
train("from checkpoint", other, seed=rank + 100)
if rank == 0:
    print(dtcomm.backend.report())  # which operations the engine carried out, and which Gloo
dist.destroy_process_group()
