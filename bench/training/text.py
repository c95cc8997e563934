"""The text workload: a GPT of 6.5 M parameters that predicts bytes of Python source code.

The corpus is what dtcomm needs anyway: the modules of Python's standard library with its tests, of torch and of NumPy,
about 87 MB. Which versions these are depends on the machine; results keep a checksum. The model computes in bf16.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
from torch import nn

from bench.training.workload import Batch, Scores, Workload, in_bf16
from dtcomm.cli.demo import train as demo

SHAPE = demo.ModelShape(vocabulary=256, context=64, layers=8, width=256, heads=4)
SAMPLES = 16
WINDOWS = 128
_NOT_OF_THE_PACKAGE = {"site-packages", "dist-packages", "__pycache__"}


def packages() -> dict[str, Path]:
    """Return the folders of the corpus."""
    return {
        "numpy": Path(numpy.__file__).parent,
        "python": Path(sysconfig.get_paths()["stdlib"]),
        "torch": Path(torch.__file__).parent,
    }


def load_corpus(roots: Mapping[str, Path]) -> demo.Corpus:
    """Return the bytes of all modules, ordered by package and path; a tenth of the files is held out.

    Order and split depend only on the names: a file is held out if the CRC-32 of its name, such as
    ``torch/nn/modules/linear.py``, is a multiple of 10.

    Raises:
        ValueError: There is too little text.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    files = 0
    for package, root in sorted(roots.items()):
        relative = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
        for name in relative:
            if _NOT_OF_THE_PACKAGE.intersection(name.split("/")):
                continue
            parts[zlib.crc32(f"{package}/{name}".encode()) % 10 == 0].append((root / name).read_bytes())
            files += 1
    texts = [b"\n".join(parts[held_out]) for held_out in (False, True)]
    if min(map(len, texts)) < 2 * WINDOWS:
        raise ValueError(f"{', '.join(map(str, roots.values()))}: {files} modules are too little to train on")
    training, held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return demo.Corpus(training=training, held_out=held_out, files=files)


@functools.cache
def corpus() -> demo.Corpus:
    """Return the corpus of this machine."""
    return load_corpus(packages())


def description(text: demo.Corpus) -> str:
    """Return the number of files and bytes of a corpus, and a checksum of all its bytes."""
    digest = hashlib.blake2b(text.training.numpy().tobytes(), digest_size=6)
    digest.update(text.held_out.numpy().tobytes())
    return (
        f"{text.files:,} modules of Python, torch and NumPy, {text.training.numel() / 1e6:.1f} MB for training, "
        f"{text.held_out.numel() / 1e6:.1f} MB held out, BLAKE2b {digest.hexdigest()}"
    )


@functools.cache
def data() -> str:
    """Return the description of this machine's corpus."""
    return description(corpus())


def training_batch(seed: int, step: int) -> Batch:
    """Return the windows of a step, which may be anywhere in the text."""
    return demo.training_batch(corpus(), seed=seed, step=step, rank=0, size=SAMPLES, length=SHAPE.context)


class Block(demo.Block):
    """The demo's block with attention in fp32: torch's backward of attention in bf16 takes CPUs three times as long."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().attend(query.float(), key.float(), value.float())


def gpt(shape: demo.ModelShape = SHAPE) -> demo.GPT:
    """Return the model; the default shape has 6.5 M parameters."""
    return demo.GPT(shape, Block)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte."""
    with in_bf16():
        return demo.cross_entropy(model, *batch)


@torch.no_grad()
def held_out(model: nn.Module) -> Scores:
    """Return the cross-entropy and the share of bytes that were predicted, over evenly spaced held-out windows."""
    batches = demo.held_out_batches(corpus(), windows=WINDOWS, size=32, length=SHAPE.context, rank=0, ranks=1)
    with in_bf16():
        logits = torch.cat([model(inputs).flatten(0, 1) for inputs, _ in batches]).float()
    targets = torch.cat([targets.flatten() for _, targets in batches])
    return Scores(
        loss=float(nn.functional.cross_entropy(logits, targets)),
        quality=100 * float((logits.argmax(1) == targets).float().mean()),
    )


TEXT = Workload(
    name="text",
    title="GPT of 6.5 M parameters, source code by bytes",
    unit="nats per byte",
    quality="bytes predicted, %",
    steps=1000,
    samples=SAMPLES,
    optimizer="adamw",
    rates={"sgd": 0.03, "adamw": 1e-3},
    model=gpt,
    batch=training_batch,
    loss=loss,
    held_out=held_out,
    data=data,
)
