"""Clocks for operations that run on the host or are queued on a CUDA device.

The command line, the benchmarks and the device tests measure through the `Clock` protocol, so the same code times CPU
tensors, CUDA tensors and, in tests, a clock with made-up times. `Clock.record` never blocks the host;
`Clock.synchronize` is the only method that does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Run = Callable[[], object]


class Clock(Protocol):
    """Measures the time between two points of the work given to a device, or to the host."""

    def record(self) -> Any:
        """Return a mark for the time at which the work queued so far on the current stream completes."""

    def synchronize(self) -> None:
        """Block the host until the current stream is idle. All marks can be read afterwards."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks."""

    def graph(self, run: Run, calls: int) -> Run:
        """Capture ``calls`` calls of ``run`` as one graph and return a function that replays it."""


class HostClock:
    """Clock for synchronous host work; ``now`` returns the time in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.record = now

    def synchronize(self) -> None:
        return None

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def graph(self, run: Run, calls: int) -> Run:
        """Return a function that makes the calls, since the host has no graphs."""

        def replay() -> None:
            for _ in range(calls):
                run()

        return replay


class DeviceClock:
    """Clock that records CUDA events on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def graph(self, run: Run, calls: int) -> Run:
        """Capture the calls on a side stream, after one uncaptured call that initializes lazily created state."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local" lets other threads, such as NCCL's watchdog, call CUDA during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                run()
        return graph.replay


class LaunchClock(DeviceClock):
    """Clock that measures the CPU time the host spends queueing work on a device."""

    def record(self) -> float:
        return time.process_time()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def make_clock(device: torch.device, cpu: bool = False) -> Clock:
    """Return the clock for work on ``device``; ``cpu`` measures this process's CPU time instead of elapsed time."""
    if device.type == "cuda":
        return LaunchClock(device) if cpu else DeviceClock(device)
    return HostClock(time.process_time) if cpu else HostClock()


def time_calls(clock: Clock, run: Run, calls: int = 1, queued_before: Run | None = None) -> float:
    """Return the seconds of one call, where ``run`` makes ``calls`` calls on the current stream.

    ``queued_before`` is queued first and not timed. While the device executes it the host runs ahead, so that launch
    latency on an idle device is not measured.
    """
    if queued_before is not None:
        queued_before()
    begin = clock.record()
    run()
    end = clock.record()
    clock.synchronize()
    return clock.seconds(begin, end) / calls


def median_seconds(
    clock: Clock, run: Run, repeats: int, calls: int = 1, queued_before: Run | None = None
) -> float:
    """Return the median of ``repeats`` measurements by `time_calls`, each synchronized before the next."""
    return statistics.median(time_calls(clock, run, calls, queued_before) for _ in range(repeats))
