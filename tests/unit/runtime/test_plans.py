"""The memory that plans take, and what the ranks' plans of one operation have in common."""

from __future__ import annotations

import random

import pytest
import torch

from dtcomm import _C, algorithms
from dtcomm.codecs import codec
from dtcomm.runtime.native import native_plan
from dtcomm.runtime.plans import PlanCache
from dtcomm.runtime.types import OpSpec, SingleRankRuntime, TensorSpec

PIECE_BYTES, SLOT_BYTES = 256 << 10, 512 << 10


def exchange(ranks: int, numel: int, splits: tuple[int, ...] = ()) -> OpSpec:
    part = TensorSpec(numel, torch.float32, codec("none"), None)
    return OpSpec("all_to_all", "sum", (part,), "one_shot", splits=splits)


def test_a_rank_keeps_its_own_rows_and_columns_of_an_exchange() -> None:
    ranks, numel = 32, (256 << 20) // 4 // 32  # 256 MB on each rank
    schedule = algorithms.build("one_shot", "all_to_all", ranks)
    plan = native_plan(exchange(ranks, numel), schedule, 5, _C.Variants(piece_bytes=PIECE_BYTES), SLOT_BYTES)
    pairs_of_rank = 2 * ranks - 1
    assert plan.pieces * pairs_of_rank * 64 < plan.memory_bytes < plan.pieces * pairs_of_rank * 100
    assert plan.memory_bytes < 8 << 20


@pytest.mark.parametrize("spec", ["none", "int8", "topk"])
def test_ranks_agree_on_the_pieces_of_unequal_shards(spec: str) -> None:
    ranks = 4
    draw = random.Random(0)
    schedule = algorithms.build("one_shot", "all_to_all", ranks)
    for _ in range(10):
        splits = tuple(draw.choice([0, 1, 1000, 70_000, 300_000]) for _ in range(ranks**2))
        part = TensorSpec(max(splits), torch.float32, codec(spec), None)
        request = OpSpec("all_to_all", "sum", (part,), "one_shot", splits=splits)
        plans = [
            native_plan(request, schedule, rank, _C.Variants(piece_bytes=PIECE_BYTES), SLOT_BYTES)
            for rank in range(ranks)
        ]
        assert len({plan.pieces for plan in plans}) == 1
        assert len({plan.fingerprint for plan in plans}) == 1


def test_plans_beyond_the_bound_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtcomm.runtime.plans.MAX_BYTES", 1000)
    monkeypatch.setattr("dtcomm.runtime.plans.MAX_PLANS", 3)
    plans = [SingleRankRuntime(), SingleRankRuntime()]
    cache = PlanCache()
    for key in range(3):
        cache.keep(key, plans[0], 300)
    assert len(cache) == 3 and cache.table_bytes == 900
    cache.keep(2, plans[1], 400)
    assert len(cache) == 3 and cache.table_bytes == 1000
    cache.keep(3, plans[0], 1)
    assert list(cache) == [3] and cache.table_bytes == 1
    cache.keep(4, plans[0], 1000)
    assert list(cache) == [4] and cache.get(4) is plans[0]
