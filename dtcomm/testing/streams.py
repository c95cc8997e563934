"""Streams of a device that is not there: work on CPU tensors is done at once, and its order is judged as a device's.

Every stream, and the host, has a clock of what it knows to be over. An access to memory must follow all accesses that
it conflicts with by events, whatever order the tests happen to run in. So what is reported is a race on a device:
a wait that is missing, memory of another stream that is not held, or a host that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtcomm.kernels import native
from dtcomm.kernels.call import Combine

MAIN, SIDE, GROUP, HOST = "the caller's stream", "the side stream", "the group's stream", "the host"
# Operators that take a value to the host.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")

Clock = dict[str, int]


class RecordedStreams:
    """``Streams`` for CPU tensors. ``faults`` collects what is wrong; ``leave_out`` names calls that do nothing, to see
    that they are missed. ``host_may_wait``: bytes go through the host.
    """

    def __init__(self, leave_out: str = "", host_may_wait: bool = False) -> None:
        self.device = torch.device("cpu")
        self.faults: list[str] = []
        self._leave_out = leave_out
        self._host_may_wait = host_may_wait
        self._clocks: dict[str, Clock] = {name: {} for name in (MAIN, SIDE, GROUP, HOST)}
        self._local = threading.local()
        self._lock = threading.RLock()
        self._accesses: list[
            tuple[int, int, str, int, bool]
        ] = []  # first and last byte, whose, when, written
        self._owned: dict[int, tuple[int, str]] = {}  # first byte -> last byte and whose it is
        self._held: list[tuple[int, int, str]] = []
        self._kept: list[Any] = []  # no address is used twice

    # --- Streams

    def current(self) -> str:
        return str(getattr(self._local, "name", MAIN))

    def side(self) -> str:
        return SIDE

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before = self.current()
        self._local.name = stream
        try:
            with (
                nullcontext() if _judge() is self else watched(self)
            ):  # a thread of the runtime's own is judged too
                yield
        finally:
            self._local.name = before

    def record(self) -> Clock:
        with self._lock:
            return dict(self._clocks[self.current()])

    def wait(self, event: Clock) -> None:
        if self._leave_out != "wait":
            self._learn(self.current(), event)

    def passed(self, event: Clock) -> bool:
        return True

    def settle(self, event: Clock) -> None:
        if not self._host_may_wait:
            self.faults.append("the host waits for the device")
        if self._leave_out != "settle":
            self._learn(HOST, event)

    def hold(self, tensor: torch.Tensor) -> None:
        if self._leave_out != "hold":
            with self._lock:
                self._held.append((*_bytes(tensor), self.current()))

    def capturing(self) -> bool:
        return False

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.Future()

    # --- what happens

    def own(self, *tensors: torch.Tensor) -> None:
        """Tensors of the caller's stream: on other streams they have to be held."""
        for tensor in tensors:
            first, last = _bytes(tensor)
            self._owned[first] = last, MAIN
            self._kept.append(tensor)

    def access(self, tensor: torch.Tensor | None, write: bool, stream: str = "") -> None:
        """The stream, by default the current one, reads or writes a tensor."""
        if tensor is None or not tensor.numel() or not tensor.is_cpu:
            return
        with self._lock:
            name = stream or self.current()
            if name != HOST:
                self._learn(name, self._clocks[HOST])  # what the host queues comes after what it did
            clock = self._clocks[name]
            now = clock[name] = clock.get(name, 0) + 1
            first, last = _bytes(tensor)
            self._kept.append(tensor.untyped_storage())
            for begin, end, whose, when, wrote in self._accesses:
                overlap = begin <= last and first <= end
                if overlap and (write or wrote) and whose != name and clock.get(whose, 0) < when:
                    verb = "writes" if write else "reads"
                    other = "wrote" if wrote else "read"
                    self.faults.append(f"{name} {verb} what {whose} {other}, and has not waited for that")
                    break
            for begin, (end, owner) in self._owned.items():
                if begin <= last and first <= end and owner != name and name in (SIDE, MAIN):
                    if not any(low <= first and last <= high and by == name for low, high, by in self._held):
                        self.faults.append(f"{name} uses memory of {owner} that is not held for it")
            self._accesses.append((first, last, name, now, write))

    def follow(self, stream: str, of: str) -> None:
        """A stream waits for what another one was given so far."""
        with self._lock:
            self._learn(stream, self._clocks[of])

    def _learn(self, name: str, event: Clock) -> None:
        with self._lock:
            clock = self._clocks[name]
            for whose, when in event.items():
                clock[whose] = max(clock.get(whose, 0), when)


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size() - 1


_watching = threading.local()


def _judge() -> RecordedStreams | None:
    """Who judges what this thread does."""
    return getattr(_watching, "streams", None)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every torch operator on this thread, as an access of the current stream."""

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operator imports torch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _judge() is not self._streams:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in WAITS:
            self._streams.faults.append(f"the host waits for the device in {name}")
        result = func(*args, **kwargs)
        schema = func._schema
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.arguments):
            return result  # a view
        given = [
            *zip(schema.arguments, args),
            *((_named(schema, key), value) for key, value in kwargs.items()),
        ]
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    self._streams.access(leaf, written)
        if "empty" not in name:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._streams.access(leaf, True)
        return result


def _named(schema: Any, name: str) -> Any:
    return next(argument for argument in schema.arguments if argument.name == name)


@contextmanager
def watched(streams: RecordedStreams) -> Iterator[None]:
    """Judge what this thread does within the block: torch's operators and the native kernels.

    Kernels are judged in every thread that is within such a block, so ranks may be threads.
    """
    _patch()
    _watching.streams = streams
    try:
        with _Watch(streams):
            yield
    finally:
        _watching.streams = None


@contextmanager
def unwatched() -> Iterator[None]:
    """What the test itself does."""
    before, _watching.streams = _judge(), None
    try:
        yield
    finally:
        _watching.streams = before


_patched = False


def _patch() -> None:
    global _patched
    if _patched:
        return
    _patched = True
    combine, decode = native.combine, native.decode

    def watched_combine(kernel: str, call: Combine) -> None:
        streams = _judge()
        if streams is not None:
            for payload in call.payloads:
                streams.access(payload, False)
            streams.access(call.local, False)
            for written in (call.residual, call.payload_out, call.out):
                streams.access(written, True)
        combine(kernel, call)

    def watched_decode(kernel: str, codec: Any, payload: torch.Tensor, *rest: Any) -> None:
        streams = _judge()
        if streams is not None:
            streams.access(payload, False)
            streams.access(rest[-1], True)
        decode(kernel, codec, payload, *rest)

    native.combine = watched_combine
    native.decode = watched_decode  # type: ignore[assignment]


class Letters:
    """An ``Exchange`` of threads: what goes from one rank to another by ``post``, on a stream of the group's.

    ``post(sends, receives)`` returns when all of both have been handed over; see ``tests.runtime``.
    """

    name = "threads"

    def __init__(self, streams: RecordedStreams, rank: int, post: Any, leave_out: str = "") -> None:
        self._streams, self._rank, self._post, self._leave_out = streams, rank, post, leave_out

    def all_to_all(self, out: torch.Tensor, out_parts: Any, given: torch.Tensor, given_parts: Any) -> Clock:
        sends = zip(torch.split(given, list(given_parts)), range(len(given_parts)), strict=True)
        takes = zip(torch.split(out, list(out_parts)), range(len(out_parts)), strict=True)
        return self._go(
            [(part, peer) for part, peer in sends if part.numel()],
            [(part, peer) for part, peer in takes if part.numel()],
        )

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> Clock:
        places = torch.split(out, given.numel())
        others = [peer for peer in range(len(places)) if peer != self._rank]
        return self._go([(given, peer) for peer in others], [(places[peer], peer) for peer in others])

    def letters(self, sends: Any, receives: Any) -> Clock:
        return self._go([each[:2] for each in sends], [each[:2] for each in receives])

    def wait(self, handle: Clock) -> None:
        if self._leave_out != "exchange":
            self._streams._learn(self._streams.current(), handle)

    def _go(self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]) -> Clock:
        streams = self._streams
        if self._leave_out != "follow":
            streams.follow(GROUP, streams.current())
        for part, _ in sends:
            streams.access(part, False, GROUP)
        for part, _ in receives:
            streams.access(part, True, GROUP)
        with unwatched():
            self._post(sends, receives)
        with streams.on(GROUP):
            return streams.record()
