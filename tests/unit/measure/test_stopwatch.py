from __future__ import annotations

import time

import pytest

from tests.support.stopwatch import Elapsed, Stopwatch


def test_a_wait_that_sleeps_exceeds_the_limit_of_the_elapsed_time() -> None:
    watch = Stopwatch()
    time.sleep(0.2)
    elapsed = watch.elapsed()
    assert elapsed.wall_s >= 0.2 and elapsed.cpu_s < 0.2
    assert not elapsed.within(cpu_s=0.2, wall_s=0.2)
    assert elapsed.within(cpu_s=0.2, wall_s=60)


def test_a_wait_that_spins_exceeds_the_limit_of_the_cpu_time() -> None:
    watch, end = Stopwatch(), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    elapsed = watch.elapsed()
    assert elapsed.cpu_s >= 0.2
    assert not elapsed.within(cpu_s=0.2, wall_s=60)


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "within"), [(1, 0.5, True), (1, 2, False), (11, 0.5, False), (11, 3, False)]
)
def test_both_limits_hold(wall_s: float, cpu_s: float, within: bool) -> None:
    assert Elapsed(wall_s, cpu_s).within(cpu_s=2, wall_s=10) == within
