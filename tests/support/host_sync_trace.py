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
        """Whether a kernel whose name contains ``name`` ran: a trace without kernels proves nothing about waits."""
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
            Event(each.name, each.device_type == DeviceType.CUDA, each.time_range.start, each.time_range.end)
            for each in profiler.events()
        ]
    )


class Event(NamedTuple):
    """One event of a trace, with its times in microseconds."""

    name: str
    on_device: bool
    start: float
    end: float


def read(events: Sequence[Event]) -> Trace:
    """The trace of the marked step among a profiler's events; the profiler itself waits before and after it."""
    step = next(each for each in events if each.name == _STEP and not each.on_device)
    waits, kernels = [], []
    for each in sorted(events, key=lambda event: event.start):
        if each.on_device:
            # A copy into pageable memory blocks the host, whatever the call is named.
            if "Pageable" in each.name and "DtoH" in each.name:
                waits.append(each.name)
            elif each.name != _STEP:
                kernels.append(each.name)
        elif step.start <= each.start <= step.end and ("Synchronize" in each.name or each.name in _WAITING):
            waits.append(each.name)
    return Trace(waits, kernels)
