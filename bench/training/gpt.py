"""GPTs of Python's source code, trained once and then read from the build folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from bench.common.native import BUILD
from bench.training import text
from dtcomm.cli.demo import train as demo

LIMIT = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and its training.

    Attributes:
        shape: The shape of the model.
        steps: Number of steps.
        samples: Windows of a step.
        rate: The learning rate.
        corpus: Returns its text.
    """

    shape: demo.ModelShape
    steps: int
    samples: int
    rate: float
    corpus: Callable[[], demo.Corpus]


#: "gpt" has 0.8 M parameters; "text" is the model of 6.5 M that bench.workloads trains.
SETTINGS = {
    "gpt": Setting(
        shape=demo.ModelShape(vocabulary=demo.VOCABULARY, context=128, layers=4, width=128, heads=4),
        steps=1200,
        samples=12,
        rate=2e-3,
        corpus=lambda: demo.load_corpus(limit=LIMIT),
    ),
    "text": Setting(
        shape=text.SHAPE,
        steps=text.TEXT.steps,
        samples=text.SAMPLES,
        rate=text.TEXT.rates["adamw"],
        corpus=text.corpus,
    ),
}
#: How its layers are sharded over ranks; embeddings and the head are replicated.
PLAN = {
    "blocks.*.qkv": "column_packed3",
    "blocks.*.projection": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}


def trained(
    setting: Setting, say: Callable[[str], None] = print, folder: Path | None = None
) -> tuple[demo.GPT, demo.Corpus]:
    """Return the model, in evaluation mode, and its text; train it if the folder (build/bench) has no weights of it."""
    corpus, shape = setting.corpus(), setting.shape
    settings = json.dumps([asdict(shape), setting.steps, setting.samples, setting.rate, len(corpus.training)])
    path = (folder or BUILD) / f"gpt-{hashlib.sha256(settings.encode()).hexdigest()[:12]}.pt"
    torch.manual_seed(0)
    model = demo.GPT(shape)
    if path.exists():
        model.load_state_dict(torch.load(path))
    else:
        train(model, corpus, setting, say)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
        say(f"weights written to {path}")
    return model.eval(), corpus


def train(model: nn.Module, corpus: demo.Corpus, setting: Setting, say: Callable[[str], None]) -> None:
    """Train with AdamW; the learning rate warms up and then falls linearly to a hundredth."""
    steps = setting.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate, betas=(0.9, 0.95), weight_decay=0.05)
    begin = time.monotonic()
    warm = max(1, steps // 20)
    for step in range(steps):
        factor = (step + 1) / warm if step < warm else 1 - 0.99 * (step - warm) / (steps - warm)
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * factor
        inputs, targets = demo.training_batch(
            corpus, seed=0, step=step, rank=0, size=setting.samples, length=setting.shape.context
        )
        loss = demo.cross_entropy(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step + 1 == steps:
            say(
                f"step {step + 1}/{steps}: {float(loss.detach()):.3f} nats per symbol, "
                f"{time.monotonic() - begin:.0f} s"
            )


@torch.no_grad()
def held_out_loss(model: demo.GPT, corpus: demo.Corpus, windows: int = 128) -> float:
    """Return the mean cross-entropy in nats per symbol over evenly spaced windows of held-out text."""
    length = model.positions.num_embeddings
    batches = demo.held_out_batches(corpus, windows=windows, size=32, length=length, rank=0, ranks=1)
    total = sum(float(demo.cross_entropy(model, *batch)) * len(batch[0]) for batch in batches)
    return total / windows


def calibration_batches(setting: Setting, corpus: demo.Corpus) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return 128 windows of the training text, so that the held-out text stays unseen."""
    length = setting.shape.context
    return [
        demo.training_batch(corpus, seed=1, step=step, rank=0, size=16, length=length) for step in range(8)
    ]


def calibration() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]], dict[str, str]]:
    """Return model, batches and plan for ``dtcomm tp calibrate bench.training.gpt:calibration``."""
    setting = SETTINGS["gpt"]
    model, corpus = trained(setting)
    return model, calibration_batches(setting, corpus), PLAN
