"""Finds races between the streams of a device, on CPU tensors: work runs immediately, and its order is checked.

Every stream, and the host, has a vector clock of the work that is ordered before its next operation. An access to
memory must be ordered by events after all accesses that it conflicts with, independently of the order in which the test
happens to run. Recorded faults are races on a device: a missing wait, memory of another stream without `record_stream`,
or a host that waits.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tests.support.op_recorder import current_recorder, recording

MAIN, SIDE, GROUP, HOST = "the caller's stream", "the side stream", "the group's stream", "the host"

Clock = dict[str, int]


class Mark(Clock):
    """A clock with the time at which it was taken."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.at = time.perf_counter()


class RecordedStreams:
    """``Streams`` for CPU tensors.

    Args:
        leave_out: The call that does nothing ("wait", "synchronize" or "record_stream"), to show that its absence is
            detected.
        host_may_wait: Whether the host may wait for the device, as transports do that move bytes through the host.

    Attributes:
        device: The device that the streams belong to.
        faults: Descriptions of the races.
    """

    def __init__(self, leave_out: str = "", host_may_wait: bool = False) -> None:
        self.device = torch.device("cpu")
        self.faults: list[str] = []
        self._leave_out = leave_out
        self._host_may_wait = host_may_wait
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._side = SIDE
        self._local = threading.local()
        self._lock = threading.RLock()
        # By start of the storage: (first byte, last byte, stream, time on its clock, whether it wrote).
        self._accesses: dict[int, list[tuple[int, int, str, int, bool]]] = defaultdict(list)
        self._owned: dict[int, str] = {}
        self._recorded: dict[int, set[str]] = defaultdict(set)
        self._storages: list[Any] = []  # kept, so that no address is reused
        self._numbers = itertools.count(2)
        self._pinned: set[int] = set()
        # Copies to the host that have not arrived: (stream, time on its clock, target, contents).
        self._host_copies: list[tuple[str, int, torch.Tensor, torch.Tensor]] = []

    def another(self) -> RecordedStreams:
        """Return the same streams with another side stream, for another user of the device."""
        view = copy.copy(self)
        view._side = f"{SIDE} {next(self._numbers)}"
        return view

    # --- the interface of Streams ---------------------------------------------------------------

    def current(self) -> str:
        return str(getattr(self._local, "name", MAIN))

    def side_stream(self) -> str:
        return self._side

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before = self.current()
        self._local.name = stream
        try:
            with (
                nullcontext() if current_recorder() is self or self.device.type != "cpu" else recording(self)
            ):  # threads of the runtime are checked too
                yield
        finally:
            self._local.name = before

    def record(self) -> Clock:
        with self._lock:
            return dict(self._clocks[self.current()])

    def wait(self, event: Clock) -> None:
        if self._leave_out != "wait":
            self.learn(self.current(), event)

    def query(self, event: Clock) -> bool:
        self._complete_host_copies(event)
        return True

    def mark(self) -> Clock:
        return Mark(self.record())

    def elapsed(self, first: Clock, second: Clock) -> float:
        assert isinstance(first, Mark) and isinstance(second, Mark)
        return second.at - first.at

    def synchronize(self, event: Clock) -> None:
        if not self._host_may_wait:
            self.faults.append("the host waits for the device")
        if self._leave_out != "synchronize":
            self.learn(HOST, event)
        self._complete_host_copies(event)

    def record_stream(self, tensor: torch.Tensor) -> None:
        if self._leave_out != "record_stream":
            with self._lock:
                self._recorded[_memory(getattr(tensor, "host", tensor))].add(self.current())

    def capturing(self) -> bool:
        return False

    def staging(self, size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        self._pinned.add(_memory(buffer))
        self._storages.append(buffer.untyped_storage())
        return buffer

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return RecordedFuture(self) if self.device.type != "cpu" else torch.futures.Future()

    # --- what happens on the streams ------------------------------------------------------------

    def own(self, *tensors: torch.Tensor) -> None:
        """Register tensors of the caller's stream; other streams must call `record_stream` before using them."""
        for tensor in tensors:
            self.allocated(tensor, MAIN)

    def allocated(self, tensor: torch.Tensor, stream: str = "") -> None:
        """Register a tensor as memory of a stream, by default the current one."""
        with self._lock:
            self._owned.setdefault(_memory(tensor), stream or self.current())
            self._storages.append(tensor.untyped_storage())

    def access(self, tensor: torch.Tensor | None, write: bool, stream: str = "") -> None:
        """Check and record that a stream, by default the current one, reads or writes a tensor."""
        tensor = getattr(tensor, "host", tensor)
        if tensor is None or not tensor.numel() or not tensor.is_cpu:
            return
        with self._lock:
            name = stream or self.current()
            if name != HOST:
                self.learn(name, self._clocks[HOST])  # a stream's work follows what the host did before
            clock = self._clocks[name]
            now = clock[name] = clock.get(name, 0) + 1
            first, last = _bytes(tensor)
            memory = _memory(tensor)
            self._storages.append(tensor.untyped_storage())
            for begin, end, stream_before, time_before, wrote_before in self._accesses[memory]:
                overlap = begin <= last and first <= end
                if (
                    overlap
                    and (write or wrote_before)
                    and stream_before != name
                    and clock.get(stream_before, 0) < time_before
                ):
                    verb = "writes" if write else "reads"
                    other = "wrote" if wrote_before else "read"
                    self.faults.append(
                        f"{name} {verb} what {stream_before} {other}, and has not waited for that"
                    )
                    break
            owner = self._owned.get(memory, name)
            if name not in (owner, GROUP, HOST) and name not in self._recorded[memory]:
                self.faults.append(f"{name} uses memory of {owner} without record_stream")
            # Accesses that are ordered before this one need not be kept: what follows this one follows them too.
            self._accesses[memory] = [
                access
                for access in self._accesses[memory]
                if access[0] < first
                or access[1] > last
                or (access[4] and not write)
                or clock.get(access[2], 0) < access[3]
            ]
            self._accesses[memory].append((first, last, name, now, write))

    def follow(self, stream: str, other: str) -> None:
        """Order a stream after all work of another one so far."""
        with self._lock:
            self.learn(stream, self._clocks[other])

    def learn(self, name: str, event: Clock) -> None:
        """Order a stream after an event."""
        with self._lock:
            clock = self._clocks[name]
            for stream, time_of in event.items():
                clock[stream] = max(clock.get(stream, 0), time_of)

    def staged(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is pinned memory of `staging`."""
        return _memory(tensor) in self._pinned

    def deliver(self, target: torch.Tensor, contents: torch.Tensor) -> None:
        """Queue a copy to the host on the current stream; it arrives when an event after it has been queried."""
        name = self.current()
        with self._lock:
            self._host_copies.append((name, self._clocks[name].get(name, 0), target, contents))
            target.view(torch.uint8).fill_(0xFF)

    def _complete_host_copies(self, event: Clock) -> None:
        with self._lock:
            due = [pending for pending in self._host_copies if event.get(pending[0], 0) >= pending[1]]
            self._host_copies[:] = [
                pending for pending in self._host_copies if event.get(pending[0], 0) < pending[1]
            ]
        for _, _, target, contents in due:
            target.copy_(contents)


class RecordedFuture(torch.futures.Future[Any]):
    """A future of the device: ``wait`` orders the current stream after it, and callbacks run on separate streams."""

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self._streams = streams
        self._event: Clock = {}

    def set_result(self, result: Any) -> None:
        self._event = self._streams.record()
        super().set_result(result)

    def wait(self) -> Any:
        value = super().wait()
        self._streams.learn(self._streams.current(), self._event)
        return value

    def then(self, callback: Callable[[Any], Any]) -> RecordedFuture:
        following = RecordedFuture(self._streams)

        def follow(done: Any) -> None:
            name = f"a future's stream {next(self._streams._numbers)}"
            with self._streams.on(name):
                self._streams.learn(name, self._event)
                try:
                    following.set_result(callback(self))
                except Exception as error:
                    following.set_exception(error)

        super().add_done_callback(follow)
        return following

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(callback)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size() - 1
