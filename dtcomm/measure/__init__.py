"""Measurement tools of the command line, benchmarks and tests. Here: a device's clock, and facts that results record.

The command line, the benchmarks and the device tests measure through the `Clock` protocol, so the same code times CPU
tensors, CUDA tensors and, in tests, a clock with made-up times. `Clock.record` never blocks the host;
`Clock.synchronize` is the only method that does.

`describe_gpu` and `versions` return what benchmarks and the command line write into their JSON results.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

import dtcomm

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


DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """Return name, uuid, compute capability, memory and driver of a CUDA device; None for an unknown driver."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "driver": _driver_version(),
    }


def processor() -> tuple[str, set[str]]:
    """Return the name of the processor and its features, as Linux names both; no features if they are not known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), set()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.machine(), set(flags[1].split()) if flags else set()


def versions() -> dict[str, Any]:
    """Return the versions of dtcomm, torch, CUDA, NCCL and Python, and the number of CPU cores."""
    nccl = None
    if torch.version.cuda is not None and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "dtcomm": dtcomm.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def _driver_version() -> str | None:
    try:
        match = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", DRIVER_FILE.read_text())
    except OSError:
        return None
    return match.group(1) if match else None
