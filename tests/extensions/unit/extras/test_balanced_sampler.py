"""Sizes of batches, stragglers and the sampler on one rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dtcomm.extensions.extras import BalancedSampler, RankSpeed, find_stragglers
from dtcomm.extensions.extras.balanced_sampler import divide


@pytest.mark.parametrize(
    ("total", "speeds", "largest", "sizes"),
    [
        (8, [1.0, 1.0], None, [4, 4]),
        (9, [1.0, 1.0], None, [5, 4]),
        (9, [2.0, 1.0], None, [6, 3]),
        (4, [100.0, 1.0, 1.0], None, [2, 1, 1]),
        (100, [3.0, 1.0], 60, [60, 40]),
        (7, [1.0], None, [7]),
    ],
)
def test_samples_are_divided_by_speed(
    total: int, speeds: list[float], largest: int | None, sizes: list[int]
) -> None:
    assert divide(total, speeds, largest) == sizes


def speeds(*rows: tuple[int, float, float, float]) -> list[RankSpeed]:
    return [
        RankSpeed(rank=rank, samples=samples, sample_s=compute / samples, wait_s=wait, link_s=link)
        for rank, (samples, compute, wait, link) in enumerate(rows)
    ]


def test_a_straggler_is_named_with_its_cause() -> None:
    even = (8, 0.10, 0.01, 0.001)
    assert find_stragglers(speeds(even, even, even)) == []
    (slow,) = find_stragglers(speeds((8, 0.1, 0.12, 0.001), (8, 0.1, 0.12, 0.001), (8, 0.2, 0.01, 0.001)))
    assert (slow.rank, slow.cause, slow.factor) == (2, "slow compute", 2.0)
    # The slow rank has a smaller batch already: its time for a sample tells.
    (slow,) = find_stragglers(speeds((10, 0.1, 0.01, 0.001), (5, 0.1, 0.01, 0.001)))
    assert (slow.rank, slow.cause) == (1, "slow compute")
    (slow,) = find_stragglers(speeds((8, 0.1, 0.1, 0.001), (8, 0.1, 0.1, 0.008), (8, 0.1, 0.1, 0.001)))
    assert str(slow) == "rank 1: slow link, 8 times the median rank's time"
    # A slow link does not count where no rank waits for communication.
    assert (
        find_stragglers(speeds((8, 0.1, 0.001, 0.001), (8, 0.1, 0.001, 0.008), (8, 0.1, 0.001, 0.001))) == []
    )


def test_batches_are_drawn_in_order_and_counted() -> None:
    sampler = BalancedSampler(range(10), 4, shuffle=False)
    assert len(sampler) == 2
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [sampler.next_samples(), sampler.next_samples()] == [4, 4]
    with pytest.raises(RuntimeError, match="a backward pass without a batch of the sampler"):
        sampler.next_samples()


def test_epochs_differ_and_a_state_continues_after_the_batches_that_were_used() -> None:
    sampler, again = (BalancedSampler(range(64), 8, seed=3) for _ in range(2))
    first = list(sampler)
    sampler.set_epoch(1)
    drawn = iter(sampler)
    second = [next(drawn) for _ in range(5)]  # a loader draws ahead of the steps
    assert sorted(itertools.chain(*first)) == list(range(64)) and first[:5] != second
    for _ in range(3):
        sampler.next_samples()
    again.load_state_dict(sampler.state_dict())
    assert again.state_dict() == sampler.state_dict() == {"epoch": 1, "batches": 3, "sizes": [8]}
    continued = list(again)
    assert continued[:2] == second[3:] and len(continued) == 5
    assert len(list(again)) == 8  # the next epoch is whole


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0: expected 1 or more"),
        ({"batch_size": 2.5}, TypeError, "batch_size: expected an integer"),
        ({"batch_size": 100}, ValueError, "data: 64 samples are less than batch_size=100"),
        ({"batch_size": 8, "every": 0}, ValueError, "every=0"),
        ({"batch_size": 8, "largest": 4}, ValueError, "largest=4: 1 ranks cannot take batch_size=8; .* 8"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BalancedSampler(range(64), **arguments)


def test_a_loader_takes_it_as_batch_sampler() -> None:
    data = torch.arange(12)
    loader: Any = torch.utils.data.DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=BalancedSampler(data, 4, shuffle=False),
    )
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
