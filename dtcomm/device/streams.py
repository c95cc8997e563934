"""The order of what is queued on a device: streams, events, and which stream uses which memory.

A runtime for devices says all of this through :class:`Streams`, so that it runs on CPU tensors too, where
``tests.support.stream_checker`` checks the discipline: work on one stream that follows work on another waits for an
event, memory that another stream uses is held for it, and the host waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """Streams of one device."""

    device: torch.device

    def current(self) -> Any:
        """The stream that the caller queues on now."""

    def side(self) -> Any:
        """A stream of our own, the same one every time."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within the block, ``stream`` is the current one."""

    def record(self) -> Any:
        """An event behind all that the current stream was given so far."""

    def wait(self, event: Any) -> None:
        """What the current stream is given from now on starts after the event; the host goes on."""

    def passed(self, event: Any) -> bool:
        """Whether the device has come past an event."""

    def mark(self) -> Any:
        """An event as of ``record``, of which the device notes the time."""

    def between(self, first: Any, second: Any) -> float:
        """Seconds of the device from one mark to another, both of which it has come past."""

    def settle(self, event: Any) -> None:
        """The host waits for an event. Only where bytes go through the host's memory, or are to be looked at."""

    def hold(self, tensor: torch.Tensor) -> None:
        """The current stream uses a tensor of another stream: its memory is not given away before that."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def staging(self, size: int) -> torch.Tensor:
        """Bytes of the host that the device copies from and to without the host's help."""

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """One whose value may be used by other streams: they wait for the stream that is current when it is set."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def side(self) -> torch.cuda.Stream:
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

    def passed(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.current())
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) * 1e-3

    def settle(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def hold(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.current())

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.Future(devices=[self.device])


class HostStreams:
    """CPU tensors: what is queued has been done."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def current(self) -> None:
        return None

    def side(self) -> None:
        return None

    def on(self, stream: None) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        return None

    def passed(self, event: None) -> bool:
        return True

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, second: float) -> float:
        return second - first

    def settle(self, event: None) -> None:
        return None

    def hold(self, tensor: torch.Tensor) -> None:
        return None

    def capturing(self) -> bool:
        return False

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.Future()


#: What serves a type of device; the CPU's streams any other.
KINDS: dict[str, Callable[[torch.device], Streams]] = {"cuda": CudaStreams}


def streams_of(device: torch.device) -> Streams:
    """Those of a CUDA device, otherwise the CPU's. Whoever asks gets a side stream of his own."""
    made = KINDS.get(device.type)
    return HostStreams() if made is None else made(device)


def hold(*tensors: torch.Tensor | None) -> None:
    """The current stream of each one's device uses it, whatever stream it was made on."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_cpu:
            streams_of(tensor.device).hold(tensor)


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, which the current stream makes; nobody waits for it, and ``host`` may change at once."""
    if device.type == "cpu":
        return host.clone() if host.is_cpu else host.cpu()
    staging = streams_of(device).staging(host.nbytes).view(host.dtype).view(host.shape)
    return staging.copy_(host).to(device, non_blocking=True)


def beside(kept: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What was kept, on the device of ``like``: a checkpoint brings CPU tensors."""
    return kept if (kept.is_cpu and like.is_cpu) or kept.device == like.device else sent(kept, like.device)


class Fetched:
    """``there``, of a device, on its way to the host behind what the current stream was given; nobody waits for it."""

    def __init__(self, there: torch.Tensor) -> None:
        self._streams = streams_of(there.device)
        self._host = there
        if not there.is_cpu:
            self._host = self._streams.staging(there.nbytes).view(there.dtype).view(there.shape)
            self._host.copy_(there, non_blocking=True)
        self._copied = self._streams.record()

    def get(self) -> torch.Tensor:
        """On the CPU. The host waits where it is not there yet, for the copy alone."""
        if not self._streams.passed(self._copied):
            self._streams.settle(self._copied)
        return self._host


def lend(streams: Streams, buffers: Iterable[Iterable[torch.Tensor | None]]) -> None:
    """The current stream uses these tensors of another stream."""
    for part in buffers:
        for tensor in part:
            if tensor is not None:
                streams.hold(tensor)


class Fence:
    """Calls of one communicator follow each other, whatever streams they are queued on.

    While a graph is captured nothing waits for what came before the capture: torch lets the device come to rest first.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: tuple[Any, Any] | None = None  # the stream of the last call, and the event behind it

    def enter(self) -> None:
        """The current stream is about to be given a call."""
        if self._last is None or self._streams.capturing():
            return
        stream, event = self._last
        if stream != self._streams.current():
            self._streams.wait(event)

    def leave(self) -> Any:
        """It has been given one; returns the event behind it."""
        event = self._streams.record()
        if not self._streams.capturing():
            self._last = self._streams.current(), event
        return event
