"""Hugging Face's Accelerate with gradients in int8: a network learns to predict the next byte of a Python file.

    pip install ".[accelerate]"    # in a checkout of dtcomm
    torchrun --nproc-per-node 2 examples/hf_accelerate.py

prepare wraps the model in DDP; attach compresses it then, and save_state saves the state of compression too. Lines
marked with + are dtcomm's.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dtcomm.ddp  # +

device = "cpu"  # on GPUs: "cuda"; Accelerate then starts "nccl"
accelerator = Accelerator(cpu=device == "cpu")
attached = dtcomm.ddp.attach(accelerator, "int8", verify=10)  # +

torch.manual_seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)
examples = TensorDataset(text.unfold(0, 16, 1)[:-1], text[16:])
network = nn.Sequential(
    nn.Embedding(128, 32), nn.Flatten(), nn.Linear(16 * 32, 512), nn.ReLU(), nn.Linear(512, 128)
)
optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
loader = DataLoader(examples, batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(network, optimizer, loader)

for step, (x, y) in enumerate(loader):
    if step == 150:
        break
    loss = nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 0:
        accelerator.print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)

attached.state.print_report()  # +
accelerator.end_training()
