"""Streams of a device that does not exist: work on CPU tensors runs at once, and its order is checked as on a device.

Every stream, and the host, has a vector clock of the work that it knows to be complete. An access to memory must be
ordered by events after all accesses that it conflicts with, whatever order the test happens to run in. The faults that
are recorded are races on a device: a missing wait, memory of another stream without `record_stream`, or a host that
waits.
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
    """``Streams`` for CPU tensors. ``faults`` collects what is wrong. ``leave_out`` names calls to leave out, to show
    that they are missed. ``host_may_wait`` is for transports that move bytes through the host.
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
        # By where the memory begins: first and last byte, whose, when, written.
        self._accesses: dict[int, list[tuple[int, int, str, int, bool]]] = defaultdict(list)
        self._owned: dict[int, str] = {}
        self._held: dict[int, set[str]] = defaultdict(set)
        self._kept: list[Any] = []  # no address is used twice
        self._numbers = itertools.count(2)
        self._pinned: set[int] = set()
        self._arriving: list[tuple[str, int, torch.Tensor, torch.Tensor]] = []  # whose, when, to, what

    def another(self) -> RecordedStreams:
        """The same device for another user with a side stream of its own."""
        face = copy.copy(self)
        face._side = f"{SIDE} {next(self._numbers)}"
        return face

    # --- Streams

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
            ):  # a thread of the runtime's own is judged too
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
        self._arrive(event)
        return True

    def mark(self) -> Clock:
        return Mark(self.record())

    def elapsed(self, first: Clock, second: Clock) -> float:
        assert isinstance(first, Mark) and isinstance(second, Mark)
        return second.at - first.at

    def synchronize(self, event: Clock) -> None:
        if not self._host_may_wait:
            self.faults.append("the host waits for the device")
        if self._leave_out != "settle":
            self.learn(HOST, event)
        self._arrive(event)

    def record_stream(self, tensor: torch.Tensor) -> None:
        if self._leave_out != "hold":
            with self._lock:
                self._held[_memory(getattr(tensor, "host", tensor))].add(self.current())

    def capturing(self) -> bool:
        return False

    def staging(self, size: int) -> torch.Tensor:
        made = torch.empty(size, dtype=torch.uint8)
        self._pinned.add(_memory(made))
        self._kept.append(made.untyped_storage())
        return made

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return RecordedFuture(self) if self.device.type != "cpu" else torch.futures.Future()

    # --- what happens

    def own(self, *tensors: torch.Tensor) -> None:
        """Tensors of the caller's stream: on other streams they have to be held."""
        for tensor in tensors:
            self.made(tensor, MAIN)

    def made(self, tensor: torch.Tensor, stream: str = "") -> None:
        """Memory that the stream, by default the current one, was given."""
        with self._lock:
            self._owned.setdefault(_memory(tensor), stream or self.current())
            self._kept.append(tensor.untyped_storage())

    def access(self, tensor: torch.Tensor | None, write: bool, stream: str = "") -> None:
        """The stream, by default the current one, reads or writes a tensor."""
        tensor = getattr(tensor, "host", tensor)
        if tensor is None or not tensor.numel() or not tensor.is_cpu:
            return
        with self._lock:
            name = stream or self.current()
            if name != HOST:
                self.learn(name, self._clocks[HOST])  # what the host queues comes after what it did
            clock = self._clocks[name]
            now = clock[name] = clock.get(name, 0) + 1
            first, last = _bytes(tensor)
            memory = _memory(tensor)
            self._kept.append(tensor.untyped_storage())
            for begin, end, whose, when, wrote in self._accesses[memory]:
                overlap = begin <= last and first <= end
                if overlap and (write or wrote) and whose != name and clock.get(whose, 0) < when:
                    verb = "writes" if write else "reads"
                    other = "wrote" if wrote else "read"
                    self.faults.append(f"{name} {verb} what {whose} {other}, and has not waited for that")
                    break
            owner = self._owned.get(memory, name)
            if name not in (owner, GROUP, HOST) and name not in self._held[memory]:
                self.faults.append(f"{name} uses memory of {owner} that is not held for it")
            # Whoever comes after this one comes after those that it has come after, too.
            self._accesses[memory] = [
                each
                for each in self._accesses[memory]
                if each[0] < first
                or each[1] > last
                or (each[4] and not write)
                or clock.get(each[2], 0) < each[3]
            ]
            self._accesses[memory].append((first, last, name, now, write))

    def follow(self, stream: str, of: str) -> None:
        """A stream waits for what another one was given so far."""
        with self._lock:
            self.learn(stream, self._clocks[of])

    def learn(self, name: str, event: Clock) -> None:
        """A stream has waited for an event."""
        with self._lock:
            clock = self._clocks[name]
            for whose, when in event.items():
                clock[whose] = max(clock.get(whose, 0), when)

    def staged(self, tensor: torch.Tensor) -> bool:
        """Whether it is memory of `staging`."""
        return _memory(tensor) in self._pinned

    def deliver(self, to: torch.Tensor, what: torch.Tensor) -> None:
        """A copy to the host that the current stream was given: it is there when an event behind it was looked at."""
        name = self.current()
        with self._lock:
            self._arriving.append((name, self._clocks[name].get(name, 0), to, what))
            to.view(torch.uint8).fill_(0xFF)

    def _arrive(self, event: Clock) -> None:
        with self._lock:
            due = [each for each in self._arriving if event.get(each[0], 0) >= each[1]]
            self._arriving[:] = [each for each in self._arriving if event.get(each[0], 0) < each[1]]
        for _, _, to, what in due:
            to.copy_(what)


class RecordedFuture(torch.futures.Future[Any]):
    """A future of a device's: whoever takes its value waits on his stream, what follows runs on a stream of its own."""

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self._streams = streams
        self._event: Clock = {}

    def set_result(self, result: Any) -> None:
        self._event = self._streams.record()
        super().set_result(result)

    def wait(self) -> Any:
        found = super().wait()
        self._streams.learn(self._streams.current(), self._event)
        return found

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
