"""Uneven ranks: weighted averages of gradients, and batches that follow the speed of the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.extensions.extras import BalancedSampler, balance
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


class ReportedSpeed(BalancedSampler):
    """A sampler with a given speed of its rank, because measured ones vary from run to run."""

    reported_s = 0.0

    def update(self, sample_s: float, wait_s: float, device: torch.device | None = None) -> None:
        assert sample_s > 0 and wait_s >= 0
        super().update(self.reported_s, 0.001, device)


def train_unevenly(rank: int, world_size: int, workers: int) -> dict[str, Any]:
    """Train with rank 1 at half the speed; return what was drawn, the sizes and the final weights."""
    samples = data()
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ReportedSpeed(samples, 12, every=4, seed=1)
    sampler.reported_s = 0.02 if rank == 1 else 0.01
    state = ddp.compress(model, "none", algorithm="one_shot")
    balance(state, sampler)
    loader: Any = torch.utils.data.DataLoader(
        torch.arange(len(samples)),  # type: ignore[arg-type]
        batch_sampler=sampler,
        num_workers=workers,
    )
    drawn = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices in loader:
            optimizer.zero_grad()
            backward(model, samples[indices])
            optimizer.step()
            drawn.append(indices.tolist())
    return {
        "drawn": drawn,
        "sizes": sampler.sizes,
        "stragglers": [str(straggler) for straggler in sampler.stragglers],
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_follow_the_speed_and_training_does_not_change(workers: int) -> None:
    first, second = run_ranks(train_unevenly, 2, workers)
    assert first["sizes"] == second["sizes"] == (8, 4)
    assert (
        first["stragglers"]
        == second["stragglers"]
        == ["rank 1: slow compute, 2 times the median rank's time"]
    )
    assert torch.equal(first["weights"], second["weights"])
    sizes = [(len(mine), len(other)) for mine, other in zip(first["drawn"], second["drawn"])]
    # The first step has no begin, so four are measured after five. A worker has drawn two batches ahead.
    assert sizes == [(6, 6)] * (5 + 2 * workers) + [(8, 4)] * (11 - 2 * workers)
    # The same samples as one rank draws, and the same weights as it reaches with them.
    alone = BalancedSampler(range(96), 12, seed=1)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for epoch in range(2):
        alone.set_epoch(epoch)
        for batch in alone:
            assert batch == first["drawn"][step] + second["drawn"][step]
            optimizer.zero_grad()
            backward(model, data()[batch])
            optimizer.step()
            step += 1
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((weights - first["weights"]).abs().max()) < 1e-5


@on_ranks(2)
def test_invalid_arguments_are_named(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        BalancedSampler(range(8), 1)
    model = wrapped()
    state = ddp.compress(model, "int8")
    with pytest.raises(TypeError, match="sampler"):
        balance(state, [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples=0: expected 1 or more"):
        state.set_samples(0, 4)
    with pytest.raises(ValueError, match="total=2: expected 3 or more"):
        state.set_samples(3, 2)
    balance(state, BalancedSampler(range(8), 4))
    with pytest.raises(RuntimeError, match="a backward pass without a batch of the sampler"):
        backward(model, data(4))
    assert isinstance(model, DistributedDataParallel)


def draw_unevenly(rank: int, world_size: int) -> list[list[int]]:
    """Draw ahead by other numbers of batches on each rank, while the speeds change twice."""
    sampler = BalancedSampler(range(120), 12, shuffle=False)
    drawn = iter(sampler)
    ahead = 4 if rank == 0 else 1
    batches = [next(drawn) for _ in range(ahead)]
    for slow in (1, 0):
        sampler.update(0.02 if rank == slow else 0.01, 0.001)
        batches += [next(drawn) for _ in range(2 if rank == 0 else 1)]
    return batches + list(drawn)


def test_batches_stay_whole_where_ranks_draw_ahead_by_other_numbers() -> None:
    first, second = run_ranks(draw_unevenly, 2)
    for index, (mine, other) in enumerate(zip(first, second, strict=True)):
        assert mine + other == list(range(12 * index, 12 * index + 12))
    sizes = [(len(mine), len(other)) for mine, other in zip(first, second)]
    assert sizes == [(6, 6)] * 4 + [(8, 4)] * 2 + [(4, 8)] * 4
