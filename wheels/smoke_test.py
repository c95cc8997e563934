"""Smoke test of an installed dtcomm on two ranks: torchrun --nproc-per-node 2 smoke_test.py."""

import sysconfig

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dtcomm
import dtcomm.ddp

assert dtcomm.__file__.startswith(sysconfig.get_path("purelib")), dtcomm.__file__
dist.init_process_group("dtcomm")
rank, size = dist.get_rank(), dist.get_world_size()

x = torch.full((100_000,), float(rank + 1))
dtcomm.all_reduce(x)
assert x.eq(size * (size + 1) / 2).all()

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(512, 512))
state = dtcomm.ddp.compress(model, "int8")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(5):
    loss = model(torch.full((4, 512), 0.1 * (rank + 1))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
assert losses[-1] < losses[0], losses
weights = [torch.empty_like(model.module.weight) for _ in range(size)]
dist.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(weights[0], other) for other in weights)

info = dtcomm.info()
assert info["runtime"] == "native", info
if rank == 0:
    print(f"dtcomm {dtcomm.__version__}, torch {torch.__version__}: {info['runtime']}, {info['transport']}")
dist.destroy_process_group()
