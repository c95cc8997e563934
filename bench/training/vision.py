"""The vision workload: a small ResNet on Fashion-MNIST, all 60,000 images, with the 10,000 test images held out.

The images come with Debian's package ``dataset-fashion-mnist``. The environment variable ``FASHION_MNIST`` names
another folder with the four files. The model computes in bf16.
"""

from __future__ import annotations

import functools
import gzip
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from bench.training.tasks import Unavailable
from bench.training.workload import Batch, Scores, Workload, in_bf16

FOLDER = Path("/usr/share/datasets/fashion-mnist")
FOLDER_VARIABLE = "FASHION_MNIST"
FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
INSTALL = (
    "Fashion-MNIST is missing: {missing}. On Debian and Ubuntu: apt-get install dataset-fashion-mnist. Elsewhere, set "
    f"{FOLDER_VARIABLE} to a folder with {', '.join(FILES)}"
)
MEAN, DEVIATION = 0.2860, 0.3530  # of the training images' pixels
SAMPLES = 128


def read_idx(path: Path) -> torch.Tensor:
    """Return the bytes of a compressed IDX file, uint8 of the shape that its header says.

    Raises:
        ValueError: It is not an IDX file of bytes, or its size does not match its header.
    """
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path}: not an IDX file of bytes")
    dimensions = data[3]
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    values = torch.frombuffer(bytearray(data[4 + 4 * dimensions :]), dtype=torch.uint8)
    if values.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path}: {values.numel()} values, expected {shape}")
    return values.view(shape)


@functools.cache
def images() -> tuple[Batch, Batch]:
    """Return training and test images, fp32 [images, 1, 28, 28] of mean 0 and deviation 1, with labels.

    Raises:
        Unavailable: The files are not on this machine; the message says what to install.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)
    missing = [str(folder / name) for name in FILES if not (folder / name).is_file()]
    if missing:
        raise Unavailable(INSTALL.format(missing=", ".join(missing)))
    pixels, labels, test_pixels, test_labels = (read_idx(folder / name) for name in FILES)
    return (normalized(pixels), labels.long()), (normalized(test_pixels), test_labels.long())


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    """Return images, uint8 [images, 28, 28], as fp32 [images, 1, 28, 28]."""
    return ((pixels.float() / 255 - MEAN) / DEVIATION)[:, None]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut; group norms, whose result does not depend on a worker's other images."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(8, width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(8, width)
        self.shortcut: nn.Module = nn.Identity()
        if channels != width or stride != 1:
            self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet(width: int = 32) -> nn.Module:
    """Return a ResNet of eight layers with 0.31 M parameters at the default width."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1, bias=False),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        ResidualBlock(width, width, 1),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def training_batch(seed: int, step: int) -> Batch:
    """Return the images of a step; an epoch is a permutation of all images."""
    inputs, labels = images()[0]
    epoch, index = divmod(step, len(labels) // SAMPLES)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed * 1009 + epoch))
    chosen = order[index * SAMPLES :][:SAMPLES]
    return inputs[chosen], labels[chosen]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    with in_bf16():
        return functional.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def held_out(model: nn.Module) -> Scores:
    """Return the cross-entropy and the accuracy on the test images."""
    inputs, labels = images()[1]
    with in_bf16():
        logits = torch.cat([model(part) for part in torch.split(inputs, 100)]).float()
    return Scores(
        loss=float(functional.cross_entropy(logits, labels)),
        quality=100 * float((logits.argmax(1) == labels).float().mean()),
    )


VISION = Workload(
    name="vision",
    title="ResNet of 0.31 M parameters, Fashion-MNIST",
    unit="nats per image",
    quality="accuracy, %",
    steps=936,  # two epochs
    samples=SAMPLES,
    optimizer="sgd",
    rates={"sgd": 0.03, "adamw": 3e-3},
    model=resnet,
    batch=training_batch,
    loss=loss,
    held_out=held_out,
    data=lambda: (
        f"Fashion-MNIST, {len(images()[0][1]):,} images for training, {len(images()[1][1]):,} held out"
    ),
)
