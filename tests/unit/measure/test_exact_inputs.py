from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dtcomm.measure import exact_inputs

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_sums_are_exact_in_every_order_in_the_dtype_itself(
    dtype: torch.dtype, world_size: int, op: str
) -> None:
    count = 1000
    parts = [
        exact_inputs.inputs("all_reduce", count, dtype, op=op, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    expected = exact_inputs.expected("all_reduce", count, dtype, op=op, rank=0, world_size=world_size)
    for seed in range(3):
        order = list(range(world_size))
        random.Random(seed).shuffle(order)
        total = torch.zeros(count, dtype=dtype)
        for rank in order:
            total += parts[rank]
        if op == "avg":
            total = torch.div(total, world_size, rounding_mode=None if dtype.is_floating_point else "trunc")
        assert exact_inputs.count_mismatches(total, expected) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_lost_or_doubled_contribution_is_detected(dtype: torch.dtype, rank: int) -> None:
    parts = [exact_inputs.inputs("all_reduce", 5000, dtype, rank=r, world_size=3).double() for r in range(3)]
    expected = exact_inputs.expected("all_reduce", 5000, dtype, rank=0, world_size=3)
    total = torch.stack(parts).sum(0)
    assert exact_inputs.count_mismatches(total.to(dtype), expected) == 0
    assert exact_inputs.count_mismatches((total - parts[rank]).to(dtype), expected) > 4500
    assert exact_inputs.count_mismatches((total + parts[rank]).to(dtype), expected) > 4500


def test_float32_values_use_the_whole_significand() -> None:
    values = exact_inputs.expected("all_reduce", 100_000, rank=0, world_size=2)
    assert values.abs().max() > 2**23
    assert not torch.equal(values.bfloat16().float(), values)


def test_shards_and_gathers_agree_with_the_whole() -> None:
    # The second and third shard lie across the end of a period.
    count, world = exact_inputs.PERIOD // 2 + 77, 3
    args: dict[str, Any] = {"dtype": torch.float32, "op": "sum", "world_size": world, "seed": 5}
    scattered = [exact_inputs.inputs("reduce_scatter", count, rank=r, **args) for r in range(world)]
    total = torch.stack(scattered).double().sum(0).float().view(world, count)
    gathered = torch.cat([exact_inputs.inputs("all_gather", count, rank=r, **args) for r in range(world)])
    source = exact_inputs.inputs("broadcast", count, rank=1, **args)
    for rank in range(world):
        whole = {"reduce_scatter": total[rank], "all_gather": gathered, "broadcast": source}
        for collective, values in whole.items():
            root = {"root": 1} if collective == "broadcast" else {}
            expected = exact_inputs.expected(collective, count, rank=rank, **root, **args)
            assert exact_inputs.count_mismatches(expected, values) == 0


def test_rooted_collectives_and_exchanges_agree_with_the_whole() -> None:
    count, world, root = 1000, 3, 2
    args: dict[str, Any] = {"world_size": world, "seed": 5}
    inputs_by_rank = [
        exact_inputs.inputs("all_to_all", count, rank=r, **args).view(world, count) for r in range(world)
    ]
    for rank in range(world):
        exchanged = exact_inputs.expected("all_to_all", count, rank=rank, **args)
        assert torch.equal(exchanged.view(world, count), torch.stack([rows[rank] for rows in inputs_by_rank]))
        assert torch.equal(
            exact_inputs.expected("scatter", count, rank=rank, root=root, **args), inputs_by_rank[root][rank]
        )
        sent = exact_inputs.inputs("sendrecv", count, rank=(rank - 1) % world, **args)
        assert torch.equal(exact_inputs.expected("sendrecv", count, rank=rank, **args), sent)
        for rooted, unrooted in (("reduce", "all_reduce"), ("gather", "all_gather")):
            expected = (
                exact_inputs.expected(unrooted, count, rank=rank, **args) if rank == root else torch.empty(0)
            )
            assert torch.equal(exact_inputs.expected(rooted, count, rank=rank, root=root, **args), expected)


def test_seeds_and_ranks_differ_and_repeat() -> None:
    def make(rank: int, seed: int) -> torch.Tensor:
        return exact_inputs.inputs("all_reduce", 1000, rank=rank, world_size=4, seed=seed)

    assert torch.equal(make(1, 7), make(1, 7))
    assert exact_inputs.count_mismatches(make(1, 7), make(1, 8)) > 900
    assert exact_inputs.count_mismatches(make(1, 7), make(2, 7)) > 900


def test_min_and_max() -> None:
    parts = torch.stack(
        [exact_inputs.inputs("all_reduce", 100, op="min", rank=r, world_size=3) for r in range(3)]
    )
    for op, want in (("min", parts.amin(0)), ("max", parts.amax(0))):
        assert torch.equal(exact_inputs.expected("all_reduce", 100, op=op, rank=0, world_size=3), want)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"collective: 'allreduce'; valid: all_reduce"):
        exact_inputs.inputs("allreduce", 1, rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"op: 'prod'; valid: sum"):
        exact_inputs.expected("all_reduce", 1, op="prod", rank=0, world_size=1)


def test_the_expected_sum_is_that_of_the_normal_values() -> None:
    def make(rank: int) -> torch.Tensor:
        return exact_inputs.inputs(
            "all_reduce", 3000, torch.bfloat16, rank=rank, world_size=2, values=exact_inputs.normal
        ).double()

    expected = exact_inputs.expected(
        "all_reduce", 3000, torch.bfloat16, rank=0, world_size=2, values=exact_inputs.normal
    )
    assert torch.equal((make(0) + make(1)).bfloat16(), expected)
    assert 0.9 < make(0).std() < 1.1
