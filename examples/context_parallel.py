"""Context parallelism: every rank has a part of each sequence, and keys and values cross the ranks in int8.

    torchrun --nproc-per-node 2 examples/context_parallel.py

The model is not changed: inside the context, torch's scaled_dot_product_attention is that of the whole sequence. DDP
averages the gradients of the parameters. Lines marked with + are dtcomm's.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtcomm.context_parallel  # +

CONTEXT, WIDTH, HEADS = 256, 64, 4


class Model(nn.Module):
    """One block of attention; bytes [batch, length] and their positions to logits [batch, length, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 128))

    def forward(self, symbols: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.symbols(symbols) + self.places(positions)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


device = torch.device("cpu")  # on GPUs: torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
torch.manual_seed(0)  # the same weights and the same whole sequences on all ranks
text = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)
model = DistributedDataParallel(Model().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

for step in range(100):
    starts = torch.randint(len(text) - CONTEXT, (8, 1))
    symbols = text[starts + torch.arange(CONTEXT)].to(device)
    targets = text[starts + torch.arange(CONTEXT) + 1].to(device)
    positions = torch.arange(CONTEXT, device=device)
    with dtcomm.context_parallel.context_parallel(  # + the buffers are this rank's part inside
        buffers=[symbols, targets, positions], buffer_seq_dims=[1, 1, 0], kv_codec="int8"
    ) as state:
        loss = nn.functional.cross_entropy(model(symbols, positions).flatten(0, 1), targets.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 20 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)  # of this rank's tokens

state.print_report()  # + of the last step
dist.destroy_process_group()
