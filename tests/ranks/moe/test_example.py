"""The layer of examples/moe.py: it learns, and is the same on any number of ranks, with DDP and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dtcomm.launch.ranks import run_ranks
from examples.moe import MoE, expert_parameters, run
from tests.support.rank_tests import on_ranks

WIDTH, EXPERTS, TOKENS = 24, 8, 32
VARIANTS: list[dict[str, Any]] = [{"codec": "none"}, {"codec": "none", "capacity_factor": EXPERTS}, {}]


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mixture = MoE(
            WIDTH,
            EXPERTS,
            lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
            **options,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return x + self.mixture(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(TOKENS, 2, WIDTH, generator=generator)
    return inputs, torch.randn(TOKENS, 2, WIDTH, generator=generator)


def step(rank: int, ranks: int, variants: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Return for each variant result and gradients: this rank's result and experts, averages of the others."""
    results = []
    for options in variants:
        torch.manual_seed(5 if rank == 0 else 100 + rank)  # rank 0's state decides
        model = Model(**options)
        torch.manual_seed(6)
        nn.init.normal_(model.before.weight, std=0.3)
        nn.init.zeros_(model.before.bias)
        experts = expert_parameters(model)
        assert len(experts) == 4 * EXPERTS // ranks
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
        parallel = DistributedDataParallel(model)
        inputs, targets = (x.chunk(ranks)[rank] for x in batch())
        y = parallel(inputs)
        assert y.shape == inputs.shape
        assert int(model.mixture.counts.sum()) == 2 * inputs.shape[0] * 2
        (functional.mse_loss(y, targets) + model.mixture.auxiliary_loss).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"y": y.detach(), **gradients})
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_and_gradients_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    alone = run_ranks(step, 1, VARIANTS[:1])[0][0]
    together = run_ranks(step, ranks, VARIANTS)
    for number, options in enumerate(VARIANTS):
        parts = [results[number] for results in together]
        limit = 1e-5 if options.get("codec") == "none" else 0.05
        y = torch.cat([part["y"] for part in parts])
        assert float((y - alone["y"]).norm()) <= limit * float(alone["y"].norm())
        for name, expected in alone.items():
            if name == "y":
                continue
            (holder, *others) = [part for part in parts if name in part]
            assert len(others) == (0 if "experts" in name else ranks - 1)
            error = float((holder[name] - expected).norm())
            assert error <= limit * float(expected.norm()) + 1e-7, (options, name)


def train(rank: int, ranks: int) -> None:
    for factor in (None, 2.0):
        losses = run("fp8_e4m3", 40, factor)
        assert losses[-1] < 0.8 * losses[0]


def test_the_loss_decreases() -> None:
    run_ranks(train, 2)


@on_ranks(2)
def test_ranks_may_pass_different_numbers_of_tokens(rank: int, ranks: int) -> None:
    """A last batch, a rank without tokens, and an evaluation with larger batches between the steps of a training."""
    layer = MoE(WIDTH, EXPERTS, lambda: nn.Linear(WIDTH, WIDTH), capacity_factor=2.0, codec="none")
    for tokens in ((8, 8), (8, 5), (8, 0), (0, 0)):
        x = torch.randn(tokens[rank], WIDTH, requires_grad=True)
        y = layer(x)
        (y.square().sum() + layer.auxiliary_loss).backward()
        assert y.shape == x.shape and x.grad is not None and x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
        with torch.no_grad():
            assert layer(torch.randn(20 + rank, WIDTH)).isfinite().all()


@pytest.mark.slow
@on_ranks(2, fresh=True, timeout=120)
def test_compiled_models_have_the_same_results(rank: int, ranks: int) -> None:
    for options in VARIANTS[1:]:
        torch.manual_seed(0)
        model = Model(**options)
        inputs = batch()[0].chunk(ranks)[rank]
        results = []
        torch._dynamo.reset()
        for layer in (model, torch.compile(model, backend="aot_eager")):
            for _ in range(2):
                model.zero_grad()
                y = layer(inputs)
                (y.square().mean() + model.mixture.auxiliary_loss).backward()
            tensors = {"y": y.detach(), "counts": model.mixture.counts}
            results.append(tensors | {name: p.grad for name, p in model.named_parameters()})
        for name, expected in results[0].items():
            torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-6, msg=name)
