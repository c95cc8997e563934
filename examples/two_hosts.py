"""DDP on two hosts: gradients cross the network in int8 and stay uncompressed inside a host.

On every host, with another --node-rank, and eth0 and the address as they are there:

    export GLOO_SOCKET_IFNAME=eth0 DTCOMM_PORTS=20000-20100
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 29500 two_hosts.py

To try it on one machine, start two "hosts" that a link of 200 Mbit/s seems to join:

    export OMP_NUM_THREADS=1 DTCOMM_EMULATE_LINK="inside=400gbit,2us;between=200mbit,50us"
    for i in 1 0; do
      DTCOMM_HOST_ID=host$i torchrun --nnodes 2 --node-rank $i --nproc-per-node 1 \
        --master-addr 127.0.0.1 --master-port 29500 examples/two_hosts.py &
    done; wait
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtcomm

device = torch.device("cpu")  # on GPUs: torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
torch.manual_seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)

network = nn.Sequential(
    nn.Embedding(128, 32), nn.Flatten(), nn.Linear(16 * 32, 512), nn.ReLU(), nn.Linear(512, 128)
)
model = DistributedDataParallel(network.to(device))
state = dtcomm.ddp.compress(model, "none/int8", verify=20)  # inside a host / between hosts
if dist.get_rank() == 0:
    print({key: dtcomm.info()[key] for key in ("runtime", "reason")}, flush=True)  # what moves the bytes
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

state.print_report()
dist.destroy_process_group()
