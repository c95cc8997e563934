"""How often and between which marks calls are timed, on a clock that records its calls."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from bench.common.memory_floor import time_calls
from dtcomm.cli.perf import timing
from dtcomm.measure import HostClock, make_clock
from tests.support.recording_clock import RecordingClock


def record_calls(clock: RecordingClock) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """Return the measured call, the refill of its input and a barrier; all record themselves in the clock."""
    return lambda: clock.append("run"), lambda: clock.append("refill"), lambda: clock.append("barrier")


def test_calls_are_timed_between_marks_and_the_host_waits_once_a_batch() -> None:
    clock = RecordingClock()
    run, refill, barrier = record_calls(clock)
    times = timing.time_iterations(run, refill, clock, barrier, iters=3, warmup=1, safe=9, blocking=False)
    assert times == [1.0, 1.0, 1.0]
    batch = ["run", "record", "run", "record", "run", "record", "run", "record"]
    assert clock.events == ["refill", "run", "refill", "synchronize", "barrier", *batch, "synchronize"]


def test_sums_that_grow_are_refilled_between_batches() -> None:
    clock = RecordingClock()
    run, refill, barrier = record_calls(clock)
    times = timing.time_iterations(run, refill, clock, barrier, iters=5, warmup=0, safe=3, blocking=False)
    assert times == [1.0] * 5
    runs_between, count = [], 0
    for event in [*clock.events, "refill"]:
        count = 0 if event == "refill" and not runs_between.append(count) else count + (event == "run")
    assert runs_between == [0, 3, 3, 2]


def test_blocking_calls_begin_behind_a_barrier_that_is_not_timed() -> None:
    clock = RecordingClock()
    run, refill, barrier = record_calls(clock)
    times = timing.time_iterations(run, refill, clock, barrier, iters=2, warmup=0, safe=9, blocking=True)
    assert times == [1.0, 1.0]
    assert clock.events[5:] == ["synchronize", "barrier", "record", "run", "record"] * 2 + ["synchronize"]


def test_replays_are_queued_together_and_their_refills_are_not_timed() -> None:
    clock = RecordingClock()
    run, refill, barrier = record_calls(clock)
    times = timing.time_graph_replays(run, refill, clock, barrier, calls=4, replays=2, warmup=1)
    assert times == [4.0, 4.0]
    at = clock.events.index("graph of 4")
    assert clock.events[:at] == ["refill", "run", "synchronize"]
    runs = ["run"] * 4
    replay = ["refill", "record", *runs, "record"]
    assert clock.events[at + 1 :] == ["refill", *runs, "synchronize", "barrier", *replay * 2, "synchronize"]


def test_a_mark_is_not_read_before_the_host_has_waited() -> None:
    clock = RecordingClock()
    with pytest.raises(AssertionError, match="before the host had waited"):
        clock.seconds(clock.record(), clock.record())


def test_host_clock_times_calls_and_replays() -> None:
    now = iter([1.0, 4.0]).__next__
    calls_made = []
    assert time_calls(HostClock(now), lambda: calls_made.append(1), calls=3) == 1.0
    HostClock().graph(lambda: calls_made.append(2), 3)()
    assert calls_made == [1, 2, 2, 2]
    cpu = torch.device("cpu")
    assert (
        make_clock(cpu).record is time.perf_counter and make_clock(cpu, cpu=True).record is time.process_time
    )
