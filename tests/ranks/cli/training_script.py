"""A training script for `dtcomm run`: DDP or FSDP2, which it compresses itself if asked to; it prints its losses."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

kind, own = sys.argv[1:]
assert __name__ == "__main__" and sys.argv[0].endswith("training_script.py")
makes_group = not dist.is_initialized()
if makes_group:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
if kind == "none":
    sys.exit(0)
if kind == "ddp":
    net = DDP(net)
else:
    fully_shard(net[0])
    fully_shard(net)
if own == "compressed":
    import dtcomm

    options = {"gradients": "int4"} if kind == "fsdp" else {"codec": "int4"}
    getattr(dtcomm, kind).compress(net, **options)
if own == "hooked":
    net.register_comm_hook(None, fp16_compress_hook)
if own == "builtin":
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
if own == "idle":
    sys.exit(0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
losses = []
for _ in range(12):
    loss = (net(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
if dist.get_rank() == 0:
    print("losses", losses)
if makes_group:
    dist.destroy_process_group()
if own == "failing":
    raise LookupError("of the script")
