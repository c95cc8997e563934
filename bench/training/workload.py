"""The interface of the training workloads of bench.workloads: data, model and optimizers.

`bench.training.vision`, `bench.training.text` and `bench.training.recommendation` have one each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from bench.training.tasks import Task

#: Inputs and targets; the first dimension of both are samples.
Batch = tuple[torch.Tensor, torch.Tensor]
OPTIMIZERS = ("sgd", "adamw")


def in_bf16() -> torch.autocast:
    """Return a context in which matrix products and convolutions are in bf16, as in most training today.

    Weights, gradients and optimizers are in fp32. Processors with instructions for bf16 take about half the time.
    """
    return torch.autocast("cpu", torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a model on held-out data: mean loss, and ``quality`` in percent, of which more is better."""

    loss: float
    quality: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training workload.

    Attributes:
        name: Its name in keys and on the command line.
        title: Its title on the page.
        unit: The unit of the held-out loss.
        quality: What `Scores.quality` is.
        steps: Number of steps.
        samples: Samples of a step, which the workers divide among themselves: the mean gradient of a step does not
            depend on their number.
        optimizer: The optimizer that is usual for it, of `OPTIMIZERS`.
        rates: The learning rate that is tried first, by optimizer.
        model: Creates the model.
        batch: Returns the samples of (seed, step), of all workers.
        loss: Returns the mean loss of a model on a batch; it may compute in bf16, as `in_bf16` does.
        held_out: Returns the scores of a model on held-out data.
        data: Returns what the data are, with a checksum where they depend on the machine.
    """

    name: str
    title: str
    unit: str
    quality: str
    steps: int
    samples: int
    optimizer: str
    rates: Mapping[str, float]
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    held_out: Callable[[nn.Module], Scores]
    data: Callable[[], str]

    def part(self, seed: int, step: int, worker: int, workers: int) -> Batch:
        """Return a worker's samples of a step.

        Raises:
            ValueError: The samples of a step cannot be divided by the number of workers.
        """
        if self.samples % workers:
            raise ValueError(
                f"workers: {workers} do not divide the {self.samples} samples of a step of {self.name}"
            )
        inputs, targets = self.batch(seed, step)
        share = slice(worker * self.samples // workers, (worker + 1) * self.samples // workers)
        return inputs[share], targets[share]

    def task(self, optimizer: str, rate: float, workers: int) -> Task:
        """Return the workload as a task of `bench.training.runs.synchronous`."""
        return Task(
            name=self.name,
            title=self.title,
            metric=self.unit,
            steps=self.steps,
            rate=rate,
            model=self.model,
            batch=lambda seed, step, worker: self.part(seed, step, worker, workers),
            loss=self.loss,
            evaluate=lambda model: self.held_out(model).loss,
            adam=optimizer == "adamw",
        )

    def shortened(self, steps: int) -> Workload:
        """Return the same with another number of steps."""
        return replace(self, steps=steps)
