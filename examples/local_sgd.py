"""Local SGD for slow links: the ranks train alone and average their weights in int4 after every 10 steps.

    torchrun --nproc-per-node 2 examples/local_sgd.py
    DTCOMM_EMULATE_LINK=20mbit,20ms torchrun --nproc-per-node 2 examples/local_sgd.py    # as between two homes

Lines marked with + are dtcomm's. With outer= it is DiLoCo, with fragments= and delay= Streaming DiLoCo.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dtcomm.local_sgd import LocalSGD  # +

device = torch.device("cpu")  # on GPUs: torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
text = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)

model = nn.Sequential(
    nn.Embedding(128, 32), nn.Flatten(), nn.Linear(16 * 32, 512), nn.ReLU(), nn.Linear(512, 128)
).to(device)
local = LocalSGD(model, every=10, codec="int4")  # + all ranks start with rank 0's weights
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

generator = torch.Generator().manual_seed(dist.get_rank())  # other data on each rank
for step in range(200):
    starts = torch.randint(len(text) - 16, (64, 1), generator=generator)
    x, y = text[starts + torch.arange(16)].to(device), text[starts[:, 0] + 16].to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    local.step()  # + averages when it is time
    if dist.get_rank() == 0 and step % 25 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)

local.sync()  # + before an evaluation or a checkpoint: all ranks have the same weights now
local.print_report()  # +
dist.destroy_process_group()
