"""Train a small convolutional network on handwritten digits with DistributedDataParallel and compressed gradients.

    torchrun --nproc-per-node 2 examples/ddp_digits_cnn.py
    torchrun --nproc-per-node 2 examples/ddp_digits_cnn.py --codec powersgd:rank=2 --epochs 10
    torchrun --nproc-per-node 2 examples/ddp_digits_cnn.py --trace digits.json && dtcomm trace digits.rank*.json

This is an ordinary DDP script; lines added for dtcomm are marked with +. The 1797 digits come with scikit-learn (pip
install scikit-learn), so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dtcomm.ddp  # +

HELD_OUT = 360


def network() -> nn.Module:
    """Return a network that maps images [batch, 1, 8, 8] to logits [batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the held-out images."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return (
        TensorDataset(images[HELD_OUT:], labels[HELD_OUT:]),
        TensorDataset(images[:HELD_OUT], labels[:HELD_OUT]),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="batch size of each rank")
    parser.add_argument("--trace", help="write a timeline of the last 100 steps, one file per rank")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    training, held_out = digits()
    sampler = DistributedSampler(training, seed=0)
    batches = DataLoader(training, options.batch, sampler=sampler)

    model = DistributedDataParallel(network())
    compression = dtcomm.ddp.compress(model, options.codec, timeline=100 if options.trace else 0)  # +
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            images, labels = held_out.tensors
            accuracy = (model.module(images).argmax(1) == labels).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {accuracy:.1%}", flush=True)

    if options.trace:
        compression.trace(options.trace)  # +
    compression.print_report()  # +
    if rank == 0 and options.trace:
        print(compression.timeline.summary())  # +
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
