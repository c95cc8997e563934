"""Clocks for what is queued on a device: marks between calls, read when the device has come past them.

Whoever measures says all of this through :class:`Clock`, so that the same code runs by the host's clock on CPU tensors,
and by a made-up one in tests. A mark costs the host nothing to wait for; ``settle`` is the one place where it waits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Run = Callable[[], object]


class Clock(Protocol):
    """Of one device, or of the host."""

    def mark(self) -> Any:
        """The time at which the device is through with what the current stream was given so far."""

    def settle(self) -> None:
        """The host waits for the current stream; all marks can be read then."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks."""

    def graph(self, run: Run, calls: int) -> Run:
        """``calls`` calls of ``run`` as one graph; what is returned replays it."""


class HostClock:
    """What the host does itself: calls have ended when they return. ``now`` is in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.mark = now

    def settle(self) -> None:
        return None

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def graph(self, run: Run, calls: int) -> Run:
        """The host keeps no graphs: the calls themselves."""

        def replay() -> None:
            for _ in range(calls):
                run()

        return replay


class DeviceClock:
    """Events on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def graph(self, run: Run, calls: int) -> Run:
        """Captured on a stream of its own, after a call there that is not. Other threads may go on meanwhile."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                run()
        return graph.replay


class LaunchClock(DeviceClock):
    """The CPU time that the host spends to queue calls on a device."""

    def mark(self) -> float:
        return time.process_time()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def clock_of(device: torch.device, cpu: bool = False) -> Clock:
    """Of calls on tensors there; ``cpu``: the CPU time that they take of this process instead."""
    if device.type == "cuda":
        return LaunchClock(device) if cpu else DeviceClock(device)
    return HostClock(time.process_time) if cpu else HostClock()


def seconds_of(clock: Clock, run: Run, calls: int = 1, ahead: Run | None = None) -> float:
    """Of one of ``calls`` calls that ``run`` makes on the current stream.

    ``ahead`` is queued before and not timed: while a device is busy with it the host comes ahead, so that the way from
    the host to an idle device does not count.
    """
    if ahead is not None:
        ahead()
    begin = clock.mark()
    run()
    end = clock.mark()
    clock.settle()
    return clock.seconds(begin, end) / calls


def median_seconds(clock: Clock, run: Run, repeats: int, calls: int = 1, ahead: Run | None = None) -> float:
    """The median of ``repeats`` times of ``run``, each settled before the next one begins."""
    return statistics.median(seconds_of(clock, run, calls, ahead) for _ in range(repeats))
