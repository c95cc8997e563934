"""The training tasks: handwritten digits (a perceptron, a convolutional network) and Python's source code (a GPT).

The data come with scikit-learn and with Python. A task is small enough for hundreds of runs and large enough that most
of its parameters are compressed under the default policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from dtcomm.cli.demo import train as demo

RANKS = 4
HELD_OUT_DIGITS = 450
INSTALL = "the digits come with scikit-learn: pip install scikit-learn"


class Unavailable(Exception):
    """The data of a task are not on this machine; the message says what to install."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task.

    Attributes:
        name: Its name in keys and on the command line.
        title: Its title in the plot.
        metric: What `evaluate` returns, with its unit.
        steps: Number of steps.
        rate: The learning rate.
        model: Creates the model.
        batch: Returns inputs and targets for (seed, step, rank).
        loss: Returns the mean loss of a model on a batch.
        evaluate: Returns the final metric of a model; smaller is better.
        adam: Whether AdamW trains it instead of SGD with momentum.
    """

    name: str
    title: str
    metric: str
    steps: int
    rate: float
    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[nn.Module, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
    evaluate: Callable[[nn.Module], float]
    adam: bool = False

    def optimizer(
        self, parameters: Sequence[torch.Tensor], *, momentum: bool = True
    ) -> torch.optim.Optimizer:
        """Return SGD or AdamW; ``momentum=False``: SGD without momentum, for methods that have their own."""
        if self.adam:
            options = {"betas": (0.9, 0.95), "weight_decay": 0.05}
            return torch.optim.AdamW(parameters, lr=self.rate, fused=True, **options)
        return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9 if momentum else 0.0)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step: a short warm-up, then a linear decrease to a hundredth."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.rate * (step + 1) / warm
        return self.rate * (1 - 0.99 * (step - warm) / (self.steps - warm))


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [1797, 1, 8, 8] of mean 0 and labels, in a fixed random order; the last ones are held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Unavailable(INSTALL) from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(data.images).float()[order, None] / 8 - 1
    return images, torch.from_numpy(data.target).long()[order]


def _digit_batch(seed: int, step: int, rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the step's batch; an epoch is one permutation, divided among the ranks."""
    images, labels = digits()
    training = len(labels) - HELD_OUT_DIGITS
    steps = training // (size * RANKS)
    epoch, index = divmod(step, steps)
    order = torch.randperm(training, generator=torch.Generator().manual_seed(seed * 1009 + epoch))
    chosen = order[(index * RANKS + rank) * size :][:size]
    return images[chosen], labels[chosen]


def _digit_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def _digit_error(model: nn.Module) -> float:
    """Return the percentage of held-out digits that are misclassified."""
    images, labels = (part[-HELD_OUT_DIGITS:] for part in digits())
    return 100 * float((model(images).argmax(1) != labels).float().mean())


SHAPE = demo.ModelShape(vocabulary=demo.VOCABULARY, context=48, layers=2, width=64, heads=4)


@functools.cache
def corpus() -> demo.Corpus:
    return demo.load_corpus(limit=2_000_000)


def _text_batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return demo.training_batch(corpus(), seed=seed, step=step, rank=rank, size=6, length=SHAPE.context)


def _text_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return demo.cross_entropy(model, *batch)


@torch.no_grad()
def _text_held_out(model: nn.Module) -> float:
    batches = demo.held_out_batches(corpus(), windows=192, size=64, length=SHAPE.context, rank=0, ranks=1)
    return sum(float(_text_loss(model, batch)) for batch in batches) / len(batches)


TASKS = {
    task.name: task
    for task in (
        Task(
            name="mlp",
            title="perceptron, digits",
            metric="held-out error, %",
            steps=300,
            rate=0.05,
            model=perceptron,
            batch=_digit_batch,
            loss=_digit_loss,
            evaluate=_digit_error,
        ),
        Task(
            name="cnn",
            title="convolutional network, digits",
            metric="held-out error, %",
            steps=200,
            rate=0.05,
            model=convolutional,
            batch=_digit_batch,
            loss=_digit_loss,
            evaluate=_digit_error,
        ),
        Task(
            name="gpt",
            title="GPT, Python's source",
            metric="held-out loss, nats per character",
            steps=160,
            rate=4e-3,
            model=lambda: demo.GPT(SHAPE),
            batch=_text_batch,
            loss=_text_loss,
            evaluate=_text_held_out,
            adam=True,
        ),
    )
}
