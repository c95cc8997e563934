"""Handles of operations started with ``async_op=True``, and the thread that completes their futures.

:class:`Work` is what users see. Each runtime returns its own kind; :class:`CompositeWork` and :class:`ChainedWork`
combine handles, and :class:`DeferredWork` stands for an operation that has not been started yet. Every package may
import this module, and it imports no executor: integrations combine handles without importing the runtime.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from dtcomm import _C
from dtcomm.device.streams import Streams
from dtcomm.errors import DtcommError

PHASES = ("encode", "reduce", "decode")  # in the order of csrc/engine/phase_times.h
TensorsFuture = torch.futures.Future[list[torch.Tensor]]


class Span(NamedTuple):
    """One phase of an operation over all of its pieces.

    ``begin_ns`` and ``end_ns`` are on the clock of ``time.monotonic_ns``, from the first piece's begin to the last
    piece's end; ``busy_ns`` is the time in between that the phase ran.
    """

    phase: str
    begin_ns: int
    end_ns: int
    busy_ns: int


class Work:
    """Handle of an operation started with ``async_op=True``. It keeps the operation's tensors alive until it is done.

    Args:
        outputs: The tensors that receive the result.

    Attributes:
        wire_bytes: Bytes that this rank sent. Valid once completed.
        seconds: Time from the operation's start (not its queueing) to its end; None if it is not known, as for
            operations queued on a CUDA stream. Valid once completed.
        started_ns, finished_ns: Start and end on the clock of ``time.monotonic_ns``; 0 if not known. Valid once
            completed.
    """

    wire_bytes: int
    seconds: float | None
    started_ns: int = 0
    finished_ns: int = 0

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._outputs = list(outputs)

    def wait(self) -> None:
        """Block until the operation is done, or for CUDA tensors make the current stream wait for it.

        Raises:
            DtcommError: The error that the operation failed with.
        """
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        raise NotImplementedError

    def get_future(self) -> TensorsFuture:
        """A future of the output tensors. Another thread completes it or gives it the error."""
        raise NotImplementedError

    def spans(self) -> list[Span]:
        """The phases of the operation, if a timeline was recorded when it started. Valid once completed."""
        return []

    def drop_future(self) -> None:
        """Say that the future will not be used after all, which saves waking the thread that completes it."""


class DoneWork(Work):
    """An operation that was complete when it returned."""

    wire_bytes = 0
    seconds = 0.0

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> TensorsFuture:
        future: TensorsFuture = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class NativeWork(Work):
    """An operation of the native engine.

    ``keep_alive`` is referenced until the operation is done; ``failed`` is called with the error that it ends with.
    """

    def __init__(
        self,
        native: _C.NativeWork,
        keep_alive: Any,
        outputs: Sequence[torch.Tensor],
        failed: Callable[[DtcommError], None],
    ) -> None:
        super().__init__(outputs)
        self._failed = failed
        self._native = native
        self._operands = keep_alive
        self._future: TensorsFuture | None = None
        self._ticket = 0
        _keep_alive(self)

    def wait(self) -> None:
        try:
            self._native.wait()
        except DtcommError as error:
            self._failed(error)
            raise
        finally:
            _let_go(self)

    def is_completed(self) -> bool:
        if not self._native.finished():
            return False
        _let_go(self)
        return True

    def get_future(self) -> TensorsFuture:
        if self._future is None:
            self._future = torch.futures.Future()
            self._ticket = _notify(self)
        return self._future

    def drop_future(self) -> None:
        if self._future is not None and self._native.cancel_notify():
            self._future = None
            with _lock:
                _awaiting_completion.pop(self._ticket, None)

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        return self._native.wire_bytes

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return (self._native.finished_ns - self._native.started_ns) * 1e-9

    @property
    def started_ns(self) -> int:  # type: ignore[override]
        return self._native.started_ns

    @property
    def finished_ns(self) -> int:  # type: ignore[override]
        return self._native.finished_ns

    def spans(self) -> list[Span]:
        return [
            Span(phase, *times)
            for phase, times in zip(PHASES, self._native.phase_times(), strict=True)
            if times[0]
        ]

    def complete(self) -> None:
        """Complete the future; the completion thread calls it."""
        _let_go(self)
        future = self._future
        if future is None:
            return
        try:
            self._native.raise_failure()
        except (DtcommError, RuntimeError) as error:
            if isinstance(error, DtcommError):
                self._failed(error)
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)


class StreamWork(Work):
    """An operation queued on a side stream; ``event`` is behind it.

    ``check`` is called after ``wait`` and raises if the operation is known to have failed.
    """

    seconds = None

    def __init__(
        self,
        streams: Streams,
        event: Any,
        outputs: Sequence[torch.Tensor],
        wire_bytes: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(outputs)
        self.wire_bytes = wire_bytes
        self._streams = streams
        self._event = event
        self._check = check
        self._future: TensorsFuture | None = None

    def wait(self) -> None:
        self._streams.wait(self._event)
        if self._check is not None:
            self._check()

    def is_completed(self) -> bool:
        return self._streams.query(self._event)

    def get_future(self) -> TensorsFuture:
        """A future that is complete at once: a stream that uses its value waits for the operation."""
        if self._future is None:
            self._future = self._streams.future()
            with self._streams.on(self._streams.side_stream()):
                self._streams.wait(self._event)
                self._future.set_result(self._outputs)
        return self._future


class Outcome(NamedTuple):
    """What an operation that a runtime's thread has executed cost, and the event behind it on the thread's stream."""

    wire_bytes: int
    started_ns: int
    finished_ns: int
    event: Any
    spans: Sequence[Span]


class QueuedWork(Work):
    """An operation that a runtime's thread executes."""

    def __init__(self, outcome: Future[Outcome], outputs: Sequence[torch.Tensor], streams: Streams) -> None:
        super().__init__(outputs)
        self._outcome = outcome
        self._streams = streams
        self._future: TensorsFuture | None = None

    def wait(self) -> None:
        self._streams.wait(self._outcome.result().event)

    def is_completed(self) -> bool:
        return self._outcome.done()

    def get_future(self) -> TensorsFuture:
        if self._future is None:
            self._future = self._streams.future()
            self._outcome.add_done_callback(self._complete_future)
        return self._future

    def _complete_future(self, outcome: Future[Outcome]) -> None:
        assert self._future is not None
        failure = outcome.exception()
        if isinstance(failure, Exception):
            self._future.set_exception(failure)  # type: ignore[arg-type]
        else:
            with self._streams.on(self._streams.side_stream()):
                self._streams.wait(outcome.result().event)
                self._future.set_result(self._outputs)

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        return self._outcome.result().wire_bytes

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return (self.finished_ns - self.started_ns) * 1e-9

    @property
    def started_ns(self) -> int:  # type: ignore[override]
        return self._outcome.result().started_ns

    @property
    def finished_ns(self) -> int:  # type: ignore[override]
        return self._outcome.result().finished_ns

    def spans(self) -> list[Span]:
        return list(self._outcome.result().spans)


class CompositeWork(Work):
    """Several operations that belong to one call."""

    def __init__(self, works: Sequence[Work], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> TensorsFuture:
        all_done = torch.futures.collect_all([work.get_future() for work in self._works])
        outputs = self._outputs

        def finish(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            for future in done.value():
                future.value()  # raises what the operation failed with
            return outputs

        return all_done.then(finish)

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        return sum(work.wire_bytes for work in self._works)

    @property
    def seconds(self) -> float | None:  # type: ignore[override]
        times = [work.seconds for work in self._works]
        return sum(time for time in times if time is not None) if None not in times else None

    @property
    def started_ns(self) -> int:  # type: ignore[override]
        return min((work.started_ns for work in self._works if work.started_ns), default=0)

    @property
    def finished_ns(self) -> int:  # type: ignore[override]
        return max((work.finished_ns for work in self._works), default=0)

    def spans(self) -> list[Span]:
        return [span for work in self._works for span in work.spans()]


class ChainedWork(Work):
    """An operation followed by a callback that runs once, before anyone sees the result."""

    def __init__(self, work: Work, callback: Callable[[], None], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._work = work
        self._callback = functools.cache(callback)

    def wait(self) -> None:
        self._work.wait()
        self._callback()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> TensorsFuture:
        def finish(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            done.value()
            self._callback()
            return self._outputs

        return self._work.get_future().then(finish)

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        return self._work.wire_bytes

    @property
    def seconds(self) -> float | None:  # type: ignore[override]
        return self._work.seconds

    @property
    def started_ns(self) -> int:  # type: ignore[override]
        return self._work.started_ns

    @property
    def finished_ns(self) -> int:  # type: ignore[override]
        return self._work.finished_ns

    def spans(self) -> list[Span]:
        return self._work.spans()


class DeferredWork(Work):
    """An operation that ``begin`` starts later, once what it needs exists.

    ``begin`` is called once with the function that starts it, and ``connect_future`` after that.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._begun = threading.Event()
        self._work: Work | None = None
        self._error: BaseException | None = None
        self._future: TensorsFuture = torch.futures.Future()

    def begin(self, start: Callable[[], Work]) -> None:
        """Start the operation; what ``start`` raises is raised by ``wait``."""
        try:
            self._work = start()
        except BaseException as error:
            self._error = error
        self._begun.set()

    def connect_future(self) -> None:
        """Complete the future with the operation's own, which may run callbacks that start other operations."""
        if self._work is None:
            self._future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            self._work.get_future().add_done_callback(self._complete_future)

    def _complete_future(self, done: TensorsFuture) -> None:
        try:
            self._future.set_result(done.value())
        except BaseException as error:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def _started(self) -> Work:
        self._begun.wait()
        if self._work is None:
            assert self._error is not None
            raise self._error
        return self._work

    def wait(self) -> None:
        self._started().wait()

    def is_completed(self) -> bool:
        return self._begun.is_set() and (self._work is None or self._work.is_completed())

    def get_future(self) -> TensorsFuture:
        return self._future

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        return self._started().wire_bytes

    @property
    def seconds(self) -> float | None:  # type: ignore[override]
        return self._started().seconds


_lock = threading.Lock()
_tickets = itertools.count(1)
_awaiting_completion: dict[int, NativeWork] = {}
_alive: dict[int, NativeWork] = {}
_thread: threading.Thread | None = None


def _keep_alive(work: NativeWork) -> None:
    # The operation uses the tensors even if the caller has dropped its handle.
    if len(_alive) > 64:  # most of these were never waited for
        for other in list(_alive.values()):
            other.is_completed()
    _alive[id(work)] = work


def _let_go(work: NativeWork) -> None:
    _alive.pop(id(work), None)


def _notify(work: NativeWork) -> int:
    global _thread
    with _lock:
        ticket = next(_tickets)
        _awaiting_completion[ticket] = work
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_complete_futures, name="dtcomm-futures", daemon=True)
            _thread.start()
    _C.notify(work._native, ticket)
    return ticket


def _complete_futures() -> None:
    while (ticket := _C.next_completion()) is not None:
        with _lock:
            work = _awaiting_completion.pop(ticket)
        work.complete()
        del work


def stop() -> None:
    """End the engine's threads, at interpreter exit."""
    _C.stop()
    if _thread is not None:
        _thread.join(timeout=5)
