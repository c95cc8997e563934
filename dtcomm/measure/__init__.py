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
import shutil
import subprocess
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


# nvidia-smi's field names and the keys used in results
NVIDIA_SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.sm": "highest_sm_clock_mhz",
    "clocks.max.mem": "highest_memory_clock_mhz",
    "power.limit": "power_limit_w",
}
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """Return name, uuid, compute capability, memory, driver and clocks of a CUDA device; None for unknown values."""
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    fields = query_nvidia_smi(uuid)
    fields["driver"] = fields["driver"] or _driver_version()
    return {
        "name": properties.name,
        "uuid": uuid,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        **fields,
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


def query_nvidia_smi(uuid: str) -> dict[str, Any]:
    """Return nvidia-smi's fields for the device with this uuid; None for missing values or without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    text = ""
    if program is not None:
        query = [program, f"--query-gpu=uuid,{','.join(NVIDIA_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            text = ""
    return parse_nvidia_smi(text, uuid)


def parse_nvidia_smi(text: str, uuid: str) -> dict[str, Any]:
    """Parse the line of nvidia-smi's CSV output for the device with this uuid; numbers become floats."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 1 + len(NVIDIA_SMI_FIELDS) and uuid and cells[0].removeprefix("GPU-") == uuid:
            return dict(
                zip(NVIDIA_SMI_FIELDS.values(), map(_parse_field, NVIDIA_SMI_FIELDS, cells[1:]), strict=True)
            )
    return dict.fromkeys(NVIDIA_SMI_FIELDS.values())


def _parse_field(name: str, cell: str) -> Any:
    if name == "driver_version":
        return cell or None
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def _driver_version() -> str | None:
    try:
        match = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", DRIVER_FILE.read_text())
    except OSError:
        return None
    return match.group(1) if match else None
