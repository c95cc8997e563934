"""A small GPT of Python's source code, trained once and then read from the build folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from bench.common.native import BUILD
from dtcomm.cli.demo import train as demo

SHAPE = demo.ModelShape(vocabulary=demo.VOCABULARY, context=128, layers=4, width=128, heads=4)
STEPS, SIZE, RATE = 1200, 12, 2e-3
#: How its layers are sharded over ranks; embeddings and the head are replicated.
PLAN = {
    "blocks.*.qkv": "column_packed3",
    "blocks.*.projection": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}
LIMIT = 4_000_000


def trained(
    steps: int = STEPS, say: Callable[[str], None] = print, folder: Path | None = None
) -> tuple[demo.GPT, demo.Corpus]:
    """Return the model, in evaluation mode, and its text; train it if the folder (build/bench) has no weights of it."""
    corpus = demo.load_corpus(limit=LIMIT)
    settings = json.dumps([asdict(SHAPE), steps, SIZE, RATE, len(corpus.training)])
    path = (folder or BUILD) / f"gpt-{hashlib.sha256(settings.encode()).hexdigest()[:12]}.pt"
    torch.manual_seed(0)
    model = demo.GPT(SHAPE)
    if path.exists():
        model.load_state_dict(torch.load(path))
    else:
        train(model, corpus, steps, say)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
        say(f"weights written to {path}")
    return model.eval(), corpus


def train(model: nn.Module, corpus: demo.Corpus, steps: int, say: Callable[[str], None]) -> None:
    """Train with AdamW; the learning rate warms up and then falls linearly to a hundredth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    begin = time.monotonic()
    warm = max(1, steps // 20)
    for step in range(steps):
        factor = (step + 1) / warm if step < warm else 1 - 0.99 * (step - warm) / (steps - warm)
        for group in optimizer.param_groups:
            group["lr"] = RATE * factor
        inputs, targets = demo.training_batch(
            corpus, seed=0, step=step, rank=0, size=SIZE, length=SHAPE.context
        )
        loss = demo.cross_entropy(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step + 1 == steps:
            say(
                f"step {step + 1}/{steps}: {float(loss.detach()):.3f} nats per character, "
                f"{time.monotonic() - begin:.0f} s"
            )


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: demo.Corpus, windows: int = 128) -> float:
    """Return the mean cross-entropy in nats per character over evenly spaced windows of held-out text."""
    batches = demo.held_out_batches(corpus, windows=windows, size=32, length=SHAPE.context, rank=0, ranks=1)
    total = sum(float(demo.cross_entropy(model, *batch)) * len(batch[0]) for batch in batches)
    return total / windows


def calibration() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]], dict[str, str]]:
    """Return model, batches and plan for ``dtcomm tp calibrate bench.training.gpt:calibration``."""
    model, corpus = trained()
    batches = demo.held_out_batches(corpus, windows=64, size=16, length=SHAPE.context, rank=0, ranks=1)
    return model, batches, PLAN
