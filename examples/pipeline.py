"""Pipeline stages of torch that send activations and their gradients in int8.

    torchrun --nproc-per-node 2 examples/pipeline.py

Each rank has one stage of a network that learns the sine of its inputs. Lines marked with + are dtcomm's.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import dtcomm.pipeline  # +

device = torch.device("cpu")  # on GPUs: torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)

layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
stage = PipelineStage(layers, rank, ranks, device)
state = dtcomm.pipeline.compress(stage, "int8", feedback=True)  # +
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.Adam(layers.parameters(), lr=5e-3)

generator = torch.Generator().manual_seed(0)  # the same inputs on all ranks
for step in range(100):
    x = torch.randn(64, 64, generator=generator).to(device)
    losses: list[torch.Tensor] = []
    inputs = (x,) if rank == 0 else ()
    if rank == ranks - 1:
        schedule.step(*inputs, target=torch.sin(x), losses=losses)
        if step % 20 == 0:
            print(f"step {step:3d}  loss {torch.stack(losses).mean().item():.3f}", flush=True)
    else:
        schedule.step(*inputs)
    optimizer.step()
    optimizer.zero_grad()

state.print_report()  # + bytes of activations and gradients, and how long this rank waited
dist.destroy_process_group()
