"""`Work`, the handle of an asynchronous operation, and its kinds; `TorchWork` gives any the interface of torch's."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import _C
from dtcomm.errors import CollectiveTimeout, DtcommError
from dtcomm.streams import Streams
from dtcomm.work import completion
from dtcomm.work.statistics import PHASES, Span, Statistics

TensorsFuture = torch.futures.Future[list[torch.Tensor]]

MAX_ALIVE = 64  # of operations; with more, most were never waited for
_MIN_POLL_S, _MAX_POLL_S = 20e-6, 1e-3  # pauses between two polls of an operation with a time limit


class Work:
    """Handle of an operation started with ``async_op=True``. It keeps the operation's tensors alive until it is done.

    If none of `wait`, `is_completed` and `get_future` is called, it keeps the tensors longer: until more than 64 such
    handles exist and another operation starts, or until the communicator is closed.

    Args:
        outputs: The tensors that receive the result.
    """

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

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sent. Valid once completed."""
        return self.statistics().wire_bytes

    @property
    def seconds(self) -> float | None:
        """Time from the operation's start (not its queueing) to its end; None if it is not known, as for operations
        queued on a CUDA stream. Valid once completed."""
        return self.statistics().seconds

    @property
    def started_ns(self) -> int:
        """Start on the clock of ``time.monotonic_ns``; 0 if not known. Valid once completed."""
        return self.statistics().started_ns

    @property
    def finished_ns(self) -> int:
        """End on the clock of ``time.monotonic_ns``; 0 if not known. Valid once completed."""
        return self.statistics().finished_ns

    def spans(self) -> list[Span]:
        """The phases of the operation, if a timeline was recorded when it started. Valid once completed."""
        return []

    def statistics(self) -> Statistics:
        """What the operation cost: the four properties above as one value. Valid once completed."""
        raise NotImplementedError

    def call_when_done(self, callback: Callable[[TensorsFuture], None]) -> None:
        """Add a callback to the future. Unlike callers of ``get_future``, it must not block."""
        self.get_future().add_done_callback(callback)

    def drop_future(self) -> None:
        """Say that the future will not be used after all, which saves waking a thread that completes it."""

    def interrupted(self, error: BaseException) -> None:
        """Let the operation fail on all ranks, if that is possible: a wait for it ends with this error of a handler."""


class NativeWork(Work):
    """An operation of the native engine: waiting for it makes the waiting thread help the engine.

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
        self._waited = False
        # The operation uses the tensors even if the caller has dropped its handle.
        if len(_alive) > MAX_ALIVE:
            release_completed()
        _alive[id(self)] = self

    def wait(self) -> None:
        try:
            self._native.wait()
        except DtcommError as error:
            completion.hold_at_exit()
            self._failed(error)
            raise
        finally:
            self._waited = True
            _let_go(self)

    def is_completed(self) -> bool:
        if not self._native.finished():
            return False
        _let_go(self)
        return True

    def get_future(self) -> TensorsFuture:
        if self._waited and (self._future is None or not self._future.done()):
            # Callers that have waited expect a complete future; another thread will complete the one that exists.
            future: TensorsFuture = torch.futures.Future()
            self._complete(future)
            return future
        completion.about_to_block()  # a callback that asks for a future may wait for it
        return self._make_future()

    def _make_future(self) -> TensorsFuture:
        if self._future is None:
            self._future = torch.futures.Future()
            self._ticket = completion.notify(self._native, self.complete)
            if not self._ticket:  # no thread to complete it: the caller waits
                with contextlib.suppress(DtcommError):  # the future gets the error
                    self._native.wait()
                self.complete()
        return self._future

    def call_when_done(self, callback: Callable[[TensorsFuture], None]) -> None:
        self._make_future().add_done_callback(callback)

    def drop_future(self) -> None:
        if self._future is not None and self._native.cancel_notify():
            self._future = None
            completion.cancel(self._ticket)

    def interrupted(self, error: BaseException) -> None:
        self._native.interrupt()

    def statistics(self) -> Statistics:
        native = self._native
        started, finished = native.started_ns, native.finished_ns
        return Statistics(native.wire_bytes, (finished - started) * 1e-9, started, finished)

    def spans(self) -> list[Span]:
        return [
            Span(phase, *times)
            for phase, times in zip(PHASES, self._native.phase_times(), strict=True)
            if times[0]
        ]

    def complete(self) -> None:
        """Complete the future; a thread of `dtcomm.work.completion` calls it."""
        _let_go(self)
        if self._future is not None:
            self._complete(self._future)

    def _complete(self, future: TensorsFuture) -> None:
        try:
            self._native.raise_failure()
        except BaseException as error:
            try:
                if isinstance(error, DtcommError):
                    self._failed(error)
            finally:
                _set_exception(future, error)
        else:
            future.set_result(self._outputs)


class StreamWork(Work):
    """An operation queued on a side stream; ``event`` is behind it.

    ``check`` is called after ``wait`` and raises if the operation is known to have failed.
    """

    def __init__(
        self,
        streams: Streams,
        event: Any,
        outputs: Sequence[torch.Tensor],
        wire_bytes: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(outputs)
        self._wire_bytes = wire_bytes
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
            _set_result_behind(self._future, self._streams, self._event, self._outputs)
        return self._future

    def statistics(self) -> Statistics:
        return Statistics(self._wire_bytes, None)


class QueuedWork(Work):
    """An operation that another thread executes; that thread calls ``complete`` or ``fail`` once.

    ``detached`` leaves callbacks of the future to another thread, because they must not block the one that ends the
    operation. ``interrupt`` is a method to call when a wait is interrupted, of an object that the handle must not keep.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        streams: Streams,
        detached: bool = False,
        interrupt: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(outputs)
        self._detached = detached
        self._interrupt = None if interrupt is None else weakref.WeakMethod(interrupt)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._streams = streams
        self._event: Any = None
        self._error: BaseException | None = None
        self._future: TensorsFuture | None = None
        self._statistics = Statistics()
        self._spans: Sequence[Span] = ()

    def complete(
        self, event: Any = None, statistics: Statistics | None = None, spans: Sequence[Span] = ()
    ) -> None:
        """End the operation; ``event`` is behind its work on the device, and None on the CPU."""
        self._event, self._spans = event, spans
        self._statistics = statistics or Statistics()
        self._end()

    def fail(self, error: BaseException) -> None:
        """End the operation with an error."""
        self._error = error
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended.set()
            future = self._future  # if it is made from now on, `get_future` completes it
        if future is None:
            return
        if self._detached:
            completion.call_detached(lambda: self._complete_future(future))
        else:
            self._complete_future(future)

    def _complete_future(self, future: TensorsFuture) -> None:
        if self._error is not None:
            _set_exception(future, self._error)
        else:
            _set_result_behind(future, self._streams, self._event, self._outputs)

    def wait(self) -> None:
        if not self._ended.is_set():
            completion.about_to_block()
            completion.wait_for(self._ended.wait, interrupted=self.interrupted)
        error = self._error
        if error is not None:
            completion.hold_at_exit()
            try:
                raise error
            finally:
                del self, error  # the error's traceback must not keep the handle, which keeps the error
        self._streams.wait(self._event)

    def interrupted(self, error: BaseException) -> None:
        method = None if self._interrupt is None else self._interrupt()
        if method is not None:
            method(error)

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def get_future(self) -> TensorsFuture:
        if not self._ended.is_set():
            completion.about_to_block()
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = self._streams.future()
            done = self._ended.is_set()
        if done:
            self._complete_future(future)
        return future

    def statistics(self) -> Statistics:
        return self._statistics

    def spans(self) -> list[Span]:
        return list(self._spans)


class CompositeWork(Work):
    """The operations of one call, followed by ``on_completion``, which runs once, before anyone sees the result.

    Without operations it is complete. ``parts`` are handles of dtcomm or of torch. Those of torch have no statistics:
    then this one has none either, and asking for them raises AttributeError.
    """

    _on_completion: Callable[[], Any] | None = None

    def __init__(
        self,
        parts: Sequence[Any],
        outputs: Sequence[torch.Tensor],
        on_completion: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(outputs)
        self._parts = parts
        if on_completion is not None:
            self._on_completion = on_completion
            self._callback_lock = threading.Lock()

    def wait(self) -> None:
        for part in self._parts:
            part.wait()
        if self._on_completion is not None:
            self._run_callback()

    def _run_callback(self) -> None:
        with self._callback_lock:  # a second thread sees the result only after the callback
            if self._on_completion is not None:
                self._on_completion()
                self._on_completion = None

    def interrupted(self, error: BaseException) -> None:
        for part in self._parts:
            if isinstance(part, Work):
                part.interrupted(error)

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    def get_future(self) -> TensorsFuture:
        futures: list[torch.futures.Future[Any]] = [part.get_future() for part in self._parts]

        def finish(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            done.value()  # raises what an operation failed with
            for part in futures:
                part.value()
            if self._on_completion is not None:
                self._run_callback()
            return self._outputs

        done: torch.futures.Future[Any] = (
            futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
        )
        return done.then(finish)

    def statistics(self) -> Statistics:
        return Statistics.total(part.statistics() for part in self._parts)

    def spans(self) -> list[Span]:
        return [span for part in self._parts for span in part.spans()]


class DeferredWork(Work):
    """An operation that ``begin`` starts later, once what it needs exists.

    ``begin`` is called once with the function that starts it, and ``connect_future`` after that. ``future`` is a new
    one for values on the device of the outputs. ``interrupt`` is called if a wait is interrupted before that.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        future: TensorsFuture,
        interrupt: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(outputs)
        self._interrupt = interrupt
        self._begun = threading.Event()
        self._waited = False
        self._work: Work | None = None
        self._error: BaseException | None = None
        self._future = future

    def begin(self, start: Callable[[], Work]) -> None:
        """Start the operation; what ``start`` raises is raised by ``wait``."""
        try:
            self._work = start()
        except BaseException as error:
            self._error = error
        self._begun.set()

    def connect_future(self) -> None:
        """Complete the future with the operation's own, on another thread because of the callbacks."""
        completion.call_detached(self._connect_future)

    def _connect_future(self) -> None:
        if self._work is None:
            assert self._error is not None
            _set_exception(self._future, self._error)
        else:
            self._work.call_when_done(self._complete_future)

    def _complete_future(self, done: TensorsFuture) -> None:
        try:
            self._future.set_result(done.value())
        except BaseException as error:
            _set_exception(self._future, error)

    def _started(self) -> Work:
        if not self._begun.is_set():
            completion.about_to_block()
            completion.wait_for(self._begun.wait, interrupted=self.interrupted)
        if self._work is None:
            assert self._error is not None
            completion.hold_at_exit()
            raise self._error
        return self._work

    def wait(self) -> None:
        self._started().wait()
        self._waited = True

    def interrupted(self, error: BaseException) -> None:
        if self._work is not None:
            self._work.interrupted(error)
        elif self._interrupt is not None:
            self._interrupt(error)

    def is_completed(self) -> bool:
        return self._begun.is_set() and (self._work is None or self._work.is_completed())

    def get_future(self) -> TensorsFuture:
        if self._future.done():
            return self._future
        if self._waited and self._work is not None:  # callers that have waited expect a complete one
            return self._work.get_future()
        completion.about_to_block()
        return self._future

    def call_when_done(self, callback: Callable[[TensorsFuture], None]) -> None:
        self._future.add_done_callback(callback)

    def statistics(self) -> Statistics:
        return self._started().statistics()

    def spans(self) -> list[Span]:
        return self._started().spans()


class TorchWork(dist.Work):
    """A handle with the interface of ``torch.distributed.Work`` around one of dtcomm.

    ``limit_s`` counts from now. None: the group's timeout, which the runtime enforces.
    """

    _deadline: float | None = None
    _future: torch.futures.Future[Any] | None = None

    def __init__(self, work: Work, outputs: Sequence[torch.Tensor], limit_s: float | None = None) -> None:
        super().__init__()
        self.outputs = outputs
        self._work = work
        if limit_s is not None:
            self._deadline = time.monotonic() + limit_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion, or raise CollectiveTimeout after ``timeout``; the operation may still complete later.

        A ``timeout`` of None or zero is the operation's own limit.
        """
        deadline = self._deadline
        if timeout:
            deadline = time.monotonic() + timeout.total_seconds()
        if deadline is not None:
            self._poll_until(deadline)
        self._work.wait()
        return True

    def _poll_until(self, deadline: float) -> None:
        """Poll with growing pauses until completion; CollectiveTimeout at the deadline (of ``time.monotonic``)."""
        completion.about_to_block()
        limit_s, pause = max(deadline - time.monotonic(), 0.0), _MIN_POLL_S

        def poll(seconds: float) -> bool:
            nonlocal pause
            if not self._work.is_completed():
                time.sleep(min(pause, seconds))
                pause = min(pause * 2, _MAX_POLL_S)
            return self._work.is_completed()

        if not completion.wait_for(poll, limit_s, self._work.interrupted):
            raise CollectiveTimeout(f"{self._description()} did not end within {limit_s:g} s")

    def _description(self) -> str:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.outputs[:4])
        return f"an operation on tensors of shape {shapes or '()'}"

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        if not self._work.is_completed():
            return None
        try:
            self._work.wait()
        except BaseException as error:
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self.outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            outputs = list(self.outputs)

            def outputs_of(completed: torch.futures.Future[Any]) -> list[torch.Tensor]:
                completed.value()  # raises the operation's error
                return outputs

            self._future = self._work.get_future().then(outputs_of)
        return self._future


def _set_exception(future: TensorsFuture, error: BaseException) -> None:
    if not isinstance(error, Exception):  # torch refuses it
        error = DtcommError(f"an operation failed: {error!r}")
    future.set_exception(error)  # type: ignore[arg-type]


def _set_result_behind(
    future: TensorsFuture, streams: Streams, event: Any, outputs: list[torch.Tensor]
) -> None:
    """Complete a future so that a stream that uses its value waits for the event."""
    with streams.on(streams.side_stream()):
        streams.wait(event)
        future.set_result(outputs)


#: An operation that was complete when it was started, without tensors.
COMPLETED = CompositeWork((), ())

_alive: dict[int, NativeWork] = {}


def release_completed() -> None:
    """Drop the tensors of all operations that have completed and were never waited for."""
    for work in list(_alive.values()):
        work.is_completed()


def _let_go(work: NativeWork) -> None:
    _alive.pop(id(work), None)
