"""DDP with gradients in int8: a network learns to predict the next byte of a Python file.

    torchrun --nproc-per-node 2 examples/ddp.py
    DTCOMM_EMULATE_LINK=200mbit,50us torchrun --nproc-per-node 2 examples/ddp.py    # the same over a slow link

It is an ordinary script: three lines, marked with +, are dtcomm's. The report's last line says whether they paid.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtcomm.ddp  # +

device = torch.device("cpu")  # on GPUs: torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
torch.manual_seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)

network = nn.Sequential(
    nn.Embedding(128, 32), nn.Flatten(), nn.Linear(16 * 32, 512), nn.ReLU(), nn.Linear(512, 128)
)
model = DistributedDataParallel(network.to(device))
state = dtcomm.ddp.compress(model, "int8", verify=20)  # +
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

generator = torch.Generator().manual_seed(dist.get_rank())  # other data on each rank
for step in range(150):
    starts = torch.randint(len(text) - 16, (64, 1), generator=generator)
    x, y = text[starts + torch.arange(16)].to(device), text[starts[:, 0] + 16].to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 25 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)

state.print_report()  # +
dist.destroy_process_group()
