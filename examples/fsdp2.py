"""FSDP2 with gradients in int8 and parameters in fp8, and restarts after the loss of a rank.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise restarted ranks may connect to lost ones
    torchrun --nproc-per-node 2 --max-restarts 3 examples/fsdp2.py --checkpoints folder

It is an ordinary fully_shard script; lines marked with + are dtcomm's. With --checkpoints it continues from the last
checkpoint, bit for bit, when it is run again or when torchrun restarts it.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import dtcomm.fsdp  # +
from dtcomm.compress.checkpoint import Checkpointed  # +

parser = argparse.ArgumentParser()
parser.add_argument("--gradients", default="int8")
parser.add_argument("--parameters", default="fp8_e4m3")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--checkpoints", type=Path, help="a folder that all ranks reach")
options = parser.parse_args()

device = torch.device("cpu")  # on GPUs: torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)

blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(
    nn.Embedding(128, 32), nn.Flatten(), nn.Linear(16 * 32, 256), *blocks, nn.Linear(256, 128)
).to(device)
for block in blocks:
    fully_shard(block)
fully_shard(model)
verify = 0 if options.checkpoints else 20  # the steps that verify measures are not repeated bit for bit
state = dtcomm.fsdp.compress(model, options.gradients, options.parameters, verify=verify)  # +
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def everything() -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "compression": Checkpointed(state)}  # +


start = 0
if options.checkpoints:  # torch writes .metadata last, so a folder with it is complete
    start = max((int(path.parent.name) for path in options.checkpoints.glob("*/.metadata")), default=0)
if start:
    saved = everything()
    checkpoint.load(saved, checkpoint_id=options.checkpoints / str(start))
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])

for step in range(start, options.steps):
    generator = torch.Generator().manual_seed(step * ranks + rank)
    starts = torch.randint(len(text) - 16, (64, 1), generator=generator)
    x, y = text[starts + torch.arange(16)].to(device), text[starts[:, 0] + 16].to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 25 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)
    if options.checkpoints and ((step + 1) % options.save_every == 0 or step + 1 == options.steps):
        checkpoint.save(everything(), checkpoint_id=options.checkpoints / str(step + 1))

state.print_report()  # +
dist.destroy_process_group()
