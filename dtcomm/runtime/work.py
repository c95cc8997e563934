"""Handles of operations under way, and the one thread that completes their futures."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm import _C
from dtcomm.errors import DtcommError
from dtcomm.runtime import phase_timer
from dtcomm.runtime.phase_timer import Span


class Work:
    """An operation that was started with ``async_op=True``; it keeps its tensors alive until it is done."""

    wire_bytes: int
    """Bytes this rank put on the wire, counted; valid once completed."""
    seconds: float
    """From the operation's start (not its queueing) to its end; valid once completed."""
    started_ns: int = 0
    """Its start and its end by ``time.monotonic_ns``, 0 where nothing had to be done; valid once completed."""
    finished_ns: int = 0

    def spans(self) -> list[Span]:
        """Where the time went, for operations that started while a timeline was kept; valid once completed."""
        return []

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._outputs = list(outputs)

    def wait(self) -> None:
        """Block until the operation is done; raises what it failed with."""
        raise TypeError("abstract")

    def is_completed(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        raise TypeError("abstract")

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors; completed, or given the error, from another thread."""
        raise TypeError("abstract")

    def drop_future(self) -> None:
        """Whoever asked for the future waits himself: it need not be completed, which spares waking a thread."""


class Done(Work):
    """An operation that had nothing to wait for."""

    wire_bytes = 0
    seconds = 0.0

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class NativeWork(Work):
    """An operation of the native engine."""

    def __init__(
        self,
        native: _C.NativeWork,
        held: Any,
        outputs: Sequence[torch.Tensor],
        failed: Callable[[DtcommError], None],
    ) -> None:
        super().__init__(outputs)
        self._failed = failed
        self._native = native
        self._held = held
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._ticket = 0
        _hold(self)

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

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if self._future is None:
            self._future = torch.futures.Future()
            self._ticket = _notify(self)
        return self._future

    def drop_future(self) -> None:
        if self._future is not None and self._native.unnotify():
            self._future = None
            with _lock:
                _waiting.pop(self._ticket, None)

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
        return phase_timer.of_native(self._native)

    def complete(self) -> None:
        """Give the future its value; on the completion thread."""
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


_lock = threading.Lock()
_tickets = itertools.count(1)
_waiting: dict[int, NativeWork] = {}
_held: dict[int, NativeWork] = {}
_thread: threading.Thread | None = None


def _hold(work: NativeWork) -> None:
    """Keep tensors whose operation is under way although the caller dropped its handle."""
    if len(_held) > 64:  # of which most were never waited for
        for held in list(_held.values()):
            held.is_completed()
    _held[id(work)] = work


def _let_go(work: NativeWork) -> None:
    """Its operation has ended: whoever still needs the tensors has them."""
    _held.pop(id(work), None)


def _notify(work: NativeWork) -> int:
    global _thread
    with _lock:
        ticket = next(_tickets)
        _waiting[ticket] = work
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_complete_futures, name="dtcomm-futures", daemon=True)
            _thread.start()
    _C.notify(work._native, ticket)
    return ticket


def _complete_futures() -> None:
    while (ticket := _C.next_completion()) is not None:
        with _lock:
            work = _waiting.pop(ticket)
        work.complete()
        del work


def stop() -> None:
    """End the engine's threads; at interpreter exit."""
    _C.stop()
    if _thread is not None:
        _thread.join(timeout=5)
