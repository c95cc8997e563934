"""The recommendation workload: embeddings of 58,250 rows with a small network on top, for clicks.

The data are synthetic, because no package ships a click log. A sample has one id in each of eight fields, drawn from
Zipf's law. The structure that is planted, a factorization machine with a bias for each id and pairwise products of
hidden factors, is the same for all seeds; clicks are drawn with its probability. The entropy of
these probabilities, which the description of the data states, is the lowest loss that a model can be expected to have.

Of the gradient of a batch, only the rows of ids that occur in it are not zero.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from bench.training.workload import Batch, Scores, Workload

FIELDS = (20_000, 20_000, 10_000, 5_000, 2_000, 1_000, 200, 50)
FACTORS, WIDTH = 4, 16
SAMPLES, HELD_OUT = 1024, 16_384
HELD_OUT_SEED = 1 << 40  # no (seed, step) has it
OFFSET = -1.0  # of the logits: about a third of the samples are clicks


@functools.cache
def planted() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bias [rows] and the hidden factors [rows, FACTORS] of every id."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(FIELDS)
    return torch.randn(rows, generator=generator) * 0.5, torch.randn(
        rows, FACTORS, generator=generator
    ) * 0.35


def pairwise(factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of the products of all pairs of fields, [samples], of factors [samples, fields, width]."""
    return 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1)


def logits_of(ids: torch.Tensor) -> torch.Tensor:
    """Return the planted log-odds of a click, [samples], of ids [samples, fields]."""
    bias, factors = planted()
    return OFFSET + bias[ids].sum(1) + pairwise(factors[ids])


@functools.cache
def distributions() -> list[torch.Tensor]:
    """Return the cumulative probabilities of each field's ids, by Zipf's law with exponent 1.05."""
    weights = [torch.arange(1, size + 1, dtype=torch.float64).pow(-1.05) for size in FIELDS]
    return [torch.cumsum(weight / weight.sum(), 0) for weight in weights]


def draw(samples: int, seed: int) -> Batch:
    """Return ids, int64 [samples, fields], as rows of one table of all fields, and clicks, fp32 [samples]."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(FIELDS), samples, generator=generator, dtype=torch.float64)
    columns, first = [], 0
    for size, cumulative, values in zip(FIELDS, distributions(), uniform, strict=True):
        columns.append(first + torch.searchsorted(cumulative, values).clamp_(max=size - 1))
        first += size
    ids = torch.stack(columns, 1)
    clicks = torch.rand(samples, generator=generator) < torch.sigmoid(logits_of(ids))
    return ids, clicks.float()


class ClickModel(nn.Module):
    """Maps ids [samples, fields] to log-odds [samples]: pairwise products of embeddings, and a network of them."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(FIELDS), WIDTH, sparse=sparse)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.network = nn.Sequential(
            nn.Linear(len(FIELDS) * WIDTH, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(ids)
        logits: torch.Tensor = self.network(embedded.flatten(1)).squeeze(1) + pairwise(embedded)
        return logits


def training_batch(seed: int, step: int) -> Batch:
    """Return the samples of a step; none is seen twice."""
    return draw(SAMPLES, (seed << 20) + step)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean log loss."""
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


@functools.cache
def held_out_samples() -> Batch:
    """Return the held-out samples."""
    return draw(HELD_OUT, HELD_OUT_SEED)


@torch.no_grad()
def held_out(model: nn.Module) -> Scores:
    """Return the log loss and the area under the ROC curve on the held-out samples."""
    ids, clicks = held_out_samples()
    logits = torch.cat([model(part) for part in torch.split(ids, 4096)])
    return Scores(
        loss=float(functional.binary_cross_entropy_with_logits(logits, clicks)),
        quality=100 * area_under_curve(logits, clicks),
    )


def area_under_curve(logits: torch.Tensor, clicks: torch.Tensor) -> float:
    """Return the probability that a click has higher log-odds than a sample without one."""
    ranks = torch.empty(len(logits), dtype=torch.float64)
    ranks[logits.argsort()] = torch.arange(1, len(logits) + 1, dtype=torch.float64)
    positive = float(clicks.sum())
    above = float(ranks[clicks > 0].sum()) - positive * (positive + 1) / 2
    return above / (positive * (len(logits) - positive))


def rows_in_use(workers: int = 2) -> float:
    """Return the share of the rows that a worker's part of a step uses."""
    ids = training_batch(0, 0)[0][: SAMPLES // workers]
    return len(set(ids.flatten().tolist())) / sum(FIELDS)


def data() -> str:
    """Return what the data are, with the lowest loss that is possible on the held-out samples."""
    ids, _ = held_out_samples()
    probability = torch.sigmoid(logits_of(ids).double())
    entropy = -(probability * probability.log() + (1 - probability) * (1 - probability).log()).mean()
    return (
        f"synthetic clicks, {len(FIELDS)} fields of {sum(FIELDS):,} ids in all, of which a worker of two uses "
        f"{rows_in_use():.1%} in a step; entropy {float(entropy):.4f} nats"
    )


RECOMMENDATION = Workload(
    name="recommendation",
    title="click model of 0.94 M parameters, synthetic clicks",
    unit="nats per sample",
    quality="area under the ROC curve, %",
    steps=1500,
    samples=SAMPLES,
    optimizer="adamw",
    rates={"sgd": 3.0, "adamw": 1e-2},
    model=ClickModel,
    batch=training_batch,
    loss=loss,
    held_out=held_out,
    data=data,
)
