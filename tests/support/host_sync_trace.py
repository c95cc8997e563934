"""Finds the calls in which the host waits for a CUDA device, in a trace of torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType

_STEP = "tests.support.host_sync_trace"
# CUDA calls that return only when the device has finished its work, besides those that contain "Synchronize".
_WAITING = {
    "cudaMemcpy",
    "cudaMemcpyToSymbol",
    "cudaMemcpyFromSymbol",
    "cudaFree",
    "cudaFreeHost",
    "cuMemcpyDtoH_v2",
}


class Trace(NamedTuple):
    """``waits`` are the calls in which the host waited, in order; ``kernels`` those that ran meanwhile."""

    waits: list[str]
    kernels: list[str]

    def ran(self, name: str) -> bool:
        """Return whether a kernel whose name contains ``name`` ran; a trace without kernels proves nothing."""
        return any(name in kernel for kernel in self.kernels)


def trace(step: Callable[[], object]) -> Trace:
    """Trace ``step`` on all threads. The device is idle before it begins."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        with record_function(_STEP):
            step()
        torch.cuda.synchronize()
    return read(
        [
            Event(
                event.name, event.device_type == DeviceType.CUDA, event.time_range.start, event.time_range.end
            )
            for event in profiler.events()
        ]
    )


class Event(NamedTuple):
    """One event of a trace, with its times in microseconds."""

    name: str
    on_device: bool
    start: float
    end: float


def read(events: Sequence[Event]) -> Trace:
    """Return the trace of the marked step in a profiler's events; the profiler itself waits before and after it."""
    step = next(event for event in events if event.name == _STEP and not event.on_device)
    waits, kernels = [], []
    for event in sorted(events, key=lambda event: event.start):
        if event.on_device:
            # A copy into pageable memory blocks the host, whatever the call is named.
            if "Pageable" in event.name and "DtoH" in event.name:
                waits.append(event.name)
            elif event.name != _STEP:
                kernels.append(event.name)
        elif step.start <= event.start <= step.end and (
            "Synchronize" in event.name or event.name in _WAITING
        ):
            waits.append(event.name)
    return Trace(waits, kernels)
