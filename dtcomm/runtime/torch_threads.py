"""Threads that run torch's native code, which the interpreter waits for when it exits.

A thread that returns from native code while the interpreter is finalized ends the process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

_running: dict[object, int] = {}  # of each thread its identifier; 0: it may not have begun
_ended = threading.Condition()


def start(target: Callable[[], object], name: str) -> None:
    """Start a daemon thread that `wait` waits for from now on, also before the thread has begun."""
    token = object()
    _running[token] = 0

    def run() -> None:
        try:
            target()
        finally:
            _end(token)

    threading.Thread(target=run, name=name, daemon=True).start()


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Within the block, this thread runs native code now and then."""
    token = object()
    _running[token] = threading.get_ident()
    try:
        yield
    finally:
        _end(token)


def wait(limit_s: float) -> None:
    """Wait at most ``limit_s`` seconds for all other threads that run native code, at interpreter exit."""
    own = threading.get_ident()
    with _ended:
        _ended.wait_for(lambda: all(thread == own for thread in list(_running.values())), limit_s)


def _end(token: object) -> None:
    with _ended:
        _running.pop(token, None)
        _ended.notify_all()


def _after_fork() -> None:
    global _ended
    _running.clear()
    _ended = threading.Condition()


os.register_at_fork(after_in_child=_after_fork)
