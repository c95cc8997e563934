"""Streams and events of CPU and CUDA devices behind one interface.

Everything in dtcomm that queues work on a device does so through :class:`Streams`, so that the same code runs on CPU
tensors, where the tests check its discipline: work on one stream that depends on another stream waits for an event,
memory used by a second stream is recorded for it, and the host never blocks. Every package may import this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from dtcomm import torch_compat

#: Microseconds that a host takes to launch a kernel of a codec, and to start a call of NCCL, one after the other.
HOST_KERNEL_US, HOST_CALL_US = 15.0, 30.0


class Streams(Protocol):
    """The streams of one device, with one side stream of its own."""

    device: torch.device

    def current(self) -> Any:
        """The stream that the caller queues work on at present."""

    def side_stream(self) -> Any:
        """A second stream; every call returns the same one."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which ``stream`` is the current stream."""

    def record(self) -> Any:
        """An event behind all work queued on the current stream so far."""

    def wait(self, event: Any) -> None:
        """Make later work of the current stream wait for the event. The host does not wait."""

    def query(self, event: Any) -> bool:
        """Whether the device has passed the event."""

    def mark(self) -> Any:
        """An event like that of ``record`` that also takes the time."""

    def elapsed(self, first: Any, second: Any) -> float:
        """Seconds on the device between two marks that it has passed."""

    def synchronize(self, event: Any) -> None:
        """Block the host until the device has passed the event."""

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses a tensor allocated on another stream."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def staging(self, size: int) -> torch.Tensor:
        """A host buffer of ``size`` bytes that the device can copy from and to without blocking the host."""

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future whose value other streams may use: they wait for the stream that is current when it is set."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def side_stream(self) -> torch.cuda.Stream:
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._side

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.current())
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self.current().wait_event(event)

    def query(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.current())
        return event

    def elapsed(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) * 1e-3

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def record_stream(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.current())

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.Future(devices=[self.device])


class HostStreams:
    """The CPU as a device: queued work is done at once, so streams and events are None."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def current(self) -> None:
        return None

    def side_stream(self) -> None:
        return None

    def on(self, stream: None) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        return None

    def query(self, event: None) -> bool:
        return True

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed(self, first: float, second: float) -> float:
        return second - first

    def synchronize(self, event: None) -> None:
        return None

    def record_stream(self, tensor: torch.Tensor) -> None:
        return None

    def capturing(self) -> bool:
        return False

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.Future()


#: The class that serves each device type; HostStreams serves every other type.
STREAM_TYPES: dict[str, Callable[[torch.device], Streams]] = {"cuda": CudaStreams}


def streams_of(device: torch.device) -> Streams:
    """New streams for a device; each caller gets a side stream of its own."""
    stream_type = STREAM_TYPES.get(device.type)
    return HostStreams() if stream_type is None else stream_type(device)


def record_streams(*tensors: torch.Tensor | None) -> None:
    """Tell the allocator that the current stream of each tensor's device uses it, wherever it was allocated."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_cpu:
            streams = streams_of(tensor.device)
            for memory in torch_compat.sparse_parts(tensor) if tensor.is_sparse else (tensor,):
                streams.record_stream(memory)


def record_buffers(streams: Streams, buffers: Iterable[Iterable[torch.Tensor | None]]) -> None:
    """Tell the allocator that the current stream of ``streams`` uses all tensors in ``buffers``."""
    for tensors in buffers:
        for tensor in tensors:
            if tensor is not None:
                streams.record_stream(tensor)


def copy_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device``, queued on its current stream without blocking; ``host`` may be overwritten at once."""
    if device.type == "cpu":
        return host.clone() if host.is_cpu else host.cpu()
    staging = streams_of(device).staging(host.nbytes).view(host.dtype).view(host.shape)
    return staging.copy_(host).to(device, non_blocking=True)


def match_device(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the device of ``like``: state loaded from a checkpoint is on the CPU."""
    same = (tensor.is_cpu and like.is_cpu) or tensor.device == like.device
    return tensor if same else copy_to_device(tensor, like.device)


class AsyncHostCopy:
    """A copy of a device tensor to the host, queued behind the current stream's work; the host does not block."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._streams = streams_of(tensor.device)
        self._host = tensor
        if not tensor.is_cpu:
            self._host = self._streams.staging(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            self._host.copy_(tensor, non_blocking=True)
        self._copied = self._streams.record()

    def get(self) -> torch.Tensor:
        """The CPU tensor. Blocks the host until the copy is done."""
        if not self._streams.query(self._copied):
            self._streams.synchronize(self._copied)
        return self._host


class StreamOrder:
    """Keeps the operations of one communicator in issue order across the streams that they are queued on.

    During graph capture no wait is queued for work from before the capture: torch synchronizes the device first.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: tuple[Any, Any] | None = None  # the stream of the last operation and the event behind it

    def before_op(self) -> None:
        """Make the current stream wait for the previous operation if that was queued on another stream."""
        if self._last is None or self._streams.capturing():
            return
        stream, event = self._last
        if stream != self._streams.current():
            self._streams.wait(event)

    def after_op(self) -> Any:
        """Note that an operation has been queued on the current stream; returns the event behind it."""
        event = self._streams.record()
        if not self._streams.capturing():
            self._last = self._streams.current(), event
        return event
