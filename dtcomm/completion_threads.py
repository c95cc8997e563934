"""Threads that complete futures. A callback may block its thread, so another thread is ready to continue."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable

_STANDBY_S = 0.5  # an item that takes so long counts as blocked; below it, a slow callback keeps its place in the order
_MAX_IDLE = 2  # threads without an item that are kept

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

    def expect(self) -> None:
        """Say that an item will come; to be called once ``pending`` is true."""
        if self._watching:
            return
        with self._lock:
            if not self._started:
                self._started = True
                self._start_thread()
            self._wake.set()

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

    def _start_thread(self) -> None:
        self._idle += 1
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

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


def _after_fork() -> None:
    # A child has none of its parent's threads, and locks may be held for ever.
    for threads in _all:
        threads._reset()


os.register_at_fork(after_in_child=_after_fork)
