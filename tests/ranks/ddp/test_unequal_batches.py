"""Batches of unequal sizes on the ranks: weighted averages of gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks
from tests.unit.ddp.models import WIDTH, Net, gradients, local_gradients, wrapped

SIZES = (5, 2, 1)


def data(samples: int = 96) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(5))


def backward(model: torch.nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


def weighted_average(rank: int, world_size: int) -> tuple[float, list[torch.Tensor]]:
    """Return the difference to the gradient of the whole batch, and the gradients; check the fp32 sums."""
    model = wrapped()
    state = ddp.compress(model, "none", algorithm="one_shot")
    state.set_samples(SIZES[rank], sum(SIZES))
    samples = data(sum(SIZES))
    begin = sum(SIZES[:rank])
    with local_gradients(model) as own:
        backward(model, samples[begin : begin + SIZES[rank]])
    averaged = gradients(model)
    for name, gradient in own.items():
        parts = [torch.empty_like(gradient) for _ in range(world_size)]
        dist.all_gather(parts, gradient * (world_size * SIZES[rank] / sum(SIZES)))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert torch.equal(averaged[name], total / world_size), name
    alone = Net()
    alone.load_state_dict(model.module.state_dict())
    backward(alone, samples)
    difference = max(
        float((averaged[name] - p.grad).abs().max())
        for name, p in alone.named_parameters()
        if p.grad is not None
    )
    return difference, list(averaged.values())


def test_gradients_weighted_by_samples_are_those_of_the_whole_batch() -> None:
    results = run_ranks(weighted_average, 3)
    for difference, averaged in results:
        assert difference < 1e-6
        assert all(torch.equal(mine, first) for mine, first in zip(averaged, results[0][1]))


def keep_the_sum(rank: int, world_size: int, spec: str) -> float:
    """Return how far the means and the residuals are from the weighted gradients, while the sizes change."""
    model = wrapped()
    state = ddp.compress(model, spec, feedback=True, algorithm="one_shot", guard=None)
    name = "first.weight"
    sent = torch.zeros(WIDTH * WIDTH, dtype=torch.float64)
    received = torch.zeros_like(sent)
    for step, sizes in enumerate([(5, 2), (1, 6), (3, 4)]):
        state.set_samples(sizes[rank], sum(sizes))
        model.zero_grad()
        with local_gradients(model) as own:
            backward(model, data()[10 * step + rank :][: sizes[rank]])
        sent += own[name].flatten().double() * (world_size * sizes[rank] / sum(sizes))
        received += gradients(model)[name].flatten().double()
    lost = state.state_dict()["residuals"][name].double()
    for total in (sent, lost):
        dist.all_reduce(total)
    return float((received - (sent - lost) / world_size).abs().max() / sent.abs().max())


@pytest.mark.parametrize("spec", ["int8", "int4"])
def test_error_feedback_keeps_the_weighted_sum_while_sizes_change(spec: str) -> None:
    assert max(run_ranks(keep_the_sum, 2, spec)) < 1e-5


@on_ranks(2)
def test_invalid_arguments_are_named(rank: int, world_size: int) -> None:
    state = ddp.compress(wrapped(), "int8")
    with pytest.raises(ValueError, match="samples=0: expected 1 or more"):
        state.set_samples(0, 4)
    with pytest.raises(ValueError, match="total=2: expected 3 or more"):
        state.set_samples(3, 2)
