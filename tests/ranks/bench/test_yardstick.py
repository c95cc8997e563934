"""The yardstick: its sums equal numpy's, and its verdicts on known times are right."""

from __future__ import annotations

import ctypes
import shutil
from typing import Any

import numpy as np
import pytest

from bench.common import native
from bench.common.native import Segment, Tuning, Yardstick, tuning
from bench.common.pool import Pool, RankFailed
from bench.common.stats import Timing
from bench.common.targets import KB, all_reduce_targets, judge

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the yardstick is compiled on the spot")

MB = 1 << 20


class SummingRank:
    """A rank that all-reduces known random numbers and checks the sum."""

    def __init__(self, rank: int, ranks: int, address: tuple[str, int, int, int]) -> None:
        self.rank, self.ranks = rank, ranks
        self.yardstick = Yardstick(address, rank)

    def right(self, algorithm: int, numel: int, settings: dict[str, int]) -> bool:
        inputs = [
            np.random.default_rng(r).standard_normal(numel).astype(np.float32) for r in range(self.ranks)
        ]
        expected = inputs[0].copy()
        for other in inputs[1:]:
            expected += other
        mine = np.empty(numel, np.float32)
        if algorithm == native.DIRECT:
            mine = np.frombuffer((ctypes.c_float * numel).from_address(self.yardstick.tensor()), np.float32)
        mine[:] = inputs[self.rank]
        self.yardstick.time(algorithm, mine.ctypes.data, None, numel, Tuning(**settings), warm=0, iters=1)
        return bool((mine == expected).all())

    def refuse(self, settings: dict[str, int]) -> float:
        return self.yardstick.time(
            native.TWO_SHOT, self.yardstick.tensor(), None, 4, Tuning(**settings), warm=0, iters=1
        )

    def close(self) -> None:
        self.yardstick.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_algorithm_sums_in_rank_order(ranks: int) -> None:
    segment = Segment.create(ranks, 2 * MB, MB)
    settings: list[dict[str, Any]] = [
        {"piece_bytes": 128, "slots": 8},
        {"piece_bytes": 64 * KB, "slots": 2},
        {"piece_bytes": 256 * KB, "slots": 4, "stream_stage": 1, "stream_slot": 1, "stream_result": 1},
    ]
    with Pool(SummingRank, ranks, address=segment.address) as pool:
        for setting in settings:
            for numel in (1, 17, 4096, 100_003):
                for algorithm in (native.ONE_SHOT, native.TWO_SHOT, native.DIRECT):
                    values = tuning(ranks=ranks, **setting).as_dict()
                    assert all(pool.call("right", algorithm=algorithm, numel=numel, settings=values)), (
                        setting,
                        numel,
                    )
    segment.close()


def test_settings_that_exceed_the_ring_are_refused() -> None:
    segment = Segment.create(2, MB, MB)
    with (
        Pool(SummingRank, 2, address=segment.address) as pool,
        pytest.raises(RankFailed, match="ring is too small"),
    ):
        pool.call("refuse", settings=tuning(MB, 2).as_dict())
    segment.close()


def test_verdicts_follow_the_measured_times() -> None:
    def timing(seconds: float) -> Timing:
        return Timing.of([seconds] * 3)

    targets = [t for t in all_reduce_targets(2) if t.bytes == KB]
    fast = judge(targets, {KB: {"dtcomm": timing(1.2e-6), "gloo": timing(300e-6)}})
    assert [v["verdict"] for v in fast] == ["PASS", "PASS"]
    slow = judge(targets, {KB: {"dtcomm": timing(9e-6), "gloo": timing(300e-6)}})
    assert [v["verdict"] for v in slow] == ["MISS", "MISS"]
    assert judge(targets, {KB: {"gloo": timing(1.0)}}) == []
