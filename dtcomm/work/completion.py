"""Who completes futures, and which threads may still run native code when the interpreter exits.

Three parts. `start_thread`, `running_native` and their neighbours: a thread that returns from native code while the
interpreter is finalized aborts the process, and the release of a tensor is native code too, so the exit waits for such
threads or holds them. `CompletionThreads`: a callback of a future may block its thread, so another thread is ready to
continue. `notify` and `call_detached`: the two sets of such threads of this process. Handles in ``dtcomm.work`` use
them, and ``dtcomm.runtime.communicator`` stops them at interpreter exit.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dtcomm import _C

_HOLD_SECONDS = 60.0  # much longer than an interpreter takes to be finalized, on a loaded machine too
_STANDBY_S = 0.5  # an item that takes so long counts as blocked; below it, a slow callback keeps its place in the order
_MAX_IDLE = 2  # threads without an item that are kept

_WAIT_S = 1.0  # the longest wait in one piece

_running: dict[object, int] = {}  # of each thread its identifier; 0: it may not have begun
_ended = threading.Condition()
_exiting = 0  # the thread that has called `begin_exit`


def wait_for(
    wait: Callable[[float], object],
    limit_s: float = math.inf,
    interrupted: Callable[[BaseException], object] | None = None,
) -> bool:
    """Wait until ``wait`` returns something true, at most ``limit_s`` seconds; return whether it did.

    What waits in Python for another thread or process calls it: it ends at a time limit, or when a handler of a signal
    raises. Without ``limit_s``, what is waited for has a limit of its own, as operations have.

    Args:
        wait: Waits for at most as many seconds as it is given.
        interrupted: Called with what a handler has raised, to tell the other ranks.
    """
    end = time.monotonic() + limit_s
    try:
        while not wait(max(0.0, min(_WAIT_S, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
        return True
    except BaseException as error:
        if interrupted is not None:
            interrupted(error)
        raise


def start_thread(target: Callable[[], object], name: str) -> None:
    """Start a daemon thread that `wait_for_threads` waits for from now on, also before the thread has begun."""
    token = object()
    _running[token] = 0

    def run() -> None:
        _running[token] = threading.get_ident()
        try:
            target()
        finally:
            _end(token)

    threading.Thread(target=run, name=name, daemon=True).start()


@contextlib.contextmanager
def running_native() -> Iterator[None]:
    """Within the block, this thread runs native code now and then.

    A thread that comes when the interpreter exits already is held here.
    """
    token, own = object(), threading.get_ident()
    _running[token] = own  # before it looks whether the interpreter exits, which then looks who runs
    if _exiting and list(_running.values()).count(own) == 1:
        _end(token)
        hold_at_exit()
        _running[token] = own
    try:
        yield
    finally:
        _end(token)


def wait_for_threads(limit_s: float) -> None:
    """Wait at most ``limit_s`` seconds for all other threads that run native code."""
    own = threading.get_ident()
    with _ended:
        _ended.wait_for(lambda: all(thread == own for thread in list(_running.values())), limit_s)


def begin_exit() -> None:
    """Say that the interpreter exits in this thread: others that run no native code now are held before they do."""
    global _exiting
    _exiting = threading.get_ident()


def hold_at_exit() -> None:
    """Hold the calling thread if the interpreter exits, unless it runs native code that `wait_for_threads` waits for.

    To be called before an error is raised in a thread that the exit wakes: it would release its tensors while the
    interpreter is finalized. The process ends meanwhile. If the thread is waited for all the same, by a function of
    atexit, it goes on after a minute.
    """
    own = threading.get_ident()
    if _exiting not in (0, own) and own not in list(_running.values()):
        threading.Event().wait(_HOLD_SECONDS)


def _end(token: object) -> None:
    with _ended:
        _running.pop(token, None)
        _ended.notify_all()


_all: weakref.WeakSet[CompletionThreads] = weakref.WeakSet()


class CompletionThreads:
    """Threads that take items and call them, one after the other, in the order in which they are taken.

    One thread, the leader, takes and calls items. If an item announces that it may block (`hand_over`), or runs for
    half a second, the standby thread becomes the leader; the former leader continues with its item and is idle
    afterwards. Items that do not block need one thread and no switch between threads.

    Args:
        name: The name of the threads.
        take: Waits for the next item and returns it; None ends the threads.
        pending: Whether an item may come that ``expect`` announced. While there is none, no thread wakes up.
    """

    def __init__(
        self, name: str, take: Callable[[], Callable[[], None] | None], pending: Callable[[], bool]
    ) -> None:
        self._name, self._take, self._pending = name, take, pending
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._standby = threading.Lock()  # held by the standby thread; the other idle threads wait for it
        self._wake = threading.Event()  # wakes the standby thread
        self._watching = False  # the standby thread wakes up by itself
        self._started = self._stopped = False
        self._leader = 0  # the leader's `threading.get_ident`
        self._calling = 0  # the number of the item that the leader calls; 0: it waits for one
        self._taken = 0
        self._may_block = False
        self._idle = 0

    def expect(self) -> bool:
        """Say that an item will come; to be called once ``pending`` is true. False: no thread can be started for it."""
        if self._watching:
            return True
        with self._lock:
            if not self._started:
                self._started = self._start_thread()
            self._wake.set()
            return self._started

    def hand_over(self) -> None:
        """Let another thread lead if the calling one does: what it calls may wait for a later item."""
        if self._leader != threading.get_ident():
            return
        with self._lock:
            if self._leader == threading.get_ident():
                self._may_block = True
        self._wake.set()

    def stop(self) -> None:
        """End the idle threads, and wait until the leader has ended, which it does when ``take`` returns None."""
        self._stopped = True
        self._wake.set()
        leader = self._leader
        for thread in threading.enumerate():
            if thread.ident == leader and thread is not threading.current_thread():
                thread.join(timeout=5)

    def _start_thread(self) -> bool:
        """Start an idle thread; False if the process may have no more threads."""
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:
            return False
        self._idle += 1
        return True

    def _run(self) -> None:
        while self._await_leadership() and self._lead():
            with self._lock:
                if self._idle >= _MAX_IDLE:
                    return
                self._idle += 1

    def _await_leadership(self) -> bool:
        """Return whether this thread leads from now on; False: it has to end."""
        with self._standby:
            seen, timed_out = 0, False
            while True:
                self._wake.clear()  # before what it announces is looked at
                if self._stopped:
                    return False
                with self._lock:
                    blocked = timed_out and self._calling and self._calling == seen
                    if not self._leader or self._may_block or blocked:
                        self._leader = threading.get_ident()
                        self._calling, self._may_block = 0, False
                        self._idle -= 1
                        if not self._idle:
                            self._start_thread()
                        return True
                    seen = self._calling
                    self._watching = False  # an item that is expected from now on wakes this thread
                    self._watching = bool(seen) or self._pending()
                    limit = _STANDBY_S if self._watching else None
                timed_out = not self._wake.wait(limit)

    def _lead(self) -> bool:
        """Take and call items while this thread leads; False if there are no more."""
        this_thread = threading.get_ident()
        while True:
            item = self._take()
            if item is None:
                self._stopped = True
                self._wake.set()
                return False
            self._taken += 1
            self._calling = self._taken
            try:
                item()
            except BaseException:
                threading.excepthook(threading.ExceptHookArgs([*sys.exc_info(), threading.current_thread()]))
            del item  # while the thread waits, it must not keep what the item refers to alive
            with self._lock:
                if self._leader != this_thread:
                    return True
                self._calling, self._may_block = 0, False


_tickets = itertools.count(1)
_awaiting_completion: dict[int, Callable[[], None]] = {}


def notify(operation: _C.NativeWork, complete: Callable[[], None]) -> int:
    """Call ``complete`` on a completion thread when the operation has ended; returns a ticket for `cancel`.

    Returns 0 and calls nothing if no thread can be started.
    """
    ticket = next(_tickets)
    _awaiting_completion[ticket] = complete
    if not _completions.expect():
        del _awaiting_completion[ticket]
        return 0
    _C.notify(operation, ticket)
    return ticket


def cancel(ticket: int) -> None:
    """Forget a call of `notify` that the engine has cancelled."""
    _awaiting_completion.pop(ticket, None)


def _take_finished() -> Callable[[], None] | None:
    while (ticket := _C.next_completion()) is not None:
        # None in a forked child: an operation of its parent.
        complete = _awaiting_completion.pop(ticket, None)
        if complete is not None:
            return complete
    return None


_completions = CompletionThreads("dtcomm-futures", _take_finished, lambda: bool(_awaiting_completion))
_detached: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
_callbacks = CompletionThreads("dtcomm-callbacks", lambda: _detached.get(), lambda: not _detached.empty())
_abandoned: list[Any] = []


def call_detached(call: Callable[[], None]) -> None:
    """Call something that runs callbacks on a thread that may block; on this one if none can be started."""
    _detached.put(call)
    if not _callbacks.expect():
        while (own := _next_detached()) is not None:
            own()


def _next_detached() -> Callable[[], None] | None:
    try:
        return _detached.get_nowait()
    except queue.Empty:
        return None


def about_to_block() -> None:
    """To be called before a wait for what a completion thread may have to do."""
    _completions.hand_over()
    _callbacks.hand_over()


def stop() -> None:
    """End the threads, also the engine's, at interpreter exit, when all communicators are closed."""
    _C.stop()
    _detached.put(None)
    for threads in (_completions, _callbacks):
        threads.stop()


def _after_fork() -> None:
    # A child has none of its parent's threads, and locks may be held for ever. It completes no future of its parent,
    # and keeps the handles so that nothing of them is finalized.
    global _ended, _exiting, _detached
    for threads in _all:
        threads._reset()
    _abandoned.extend((*_awaiting_completion.values(), _detached))
    _awaiting_completion.clear()
    _detached = queue.SimpleQueue()
    _exiting = 0
    _running.clear()
    _ended = threading.Condition()


os.register_at_fork(after_in_child=_after_fork)
