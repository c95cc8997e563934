"""Threads that run torch's native code, which the interpreter waits for when it exits.

A thread that returns from native code while the interpreter is finalized aborts the process. The release of a tensor is
native code too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

_running: dict[object, int] = {}  # of each thread its identifier; 0: it may not have begun
_ended = threading.Condition()
_exiting = 0  # the thread that has called `end`


def start(target: Callable[[], object], name: str) -> None:
    """Start a daemon thread that `wait` waits for from now on, also before the thread has begun."""
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
def running() -> Iterator[None]:
    """Within the block, this thread runs native code now and then.

    A thread that comes when the interpreter exits already waits here until the process has ended.
    """
    token, own = object(), threading.get_ident()
    _running[token] = own
    if _exiting not in (0, own) and list(_running.values()).count(own) == 1:  # not within another block
        _end(token)
        threading.Event().wait()
    try:
        yield
    finally:
        _end(token)


def wait(limit_s: float) -> None:
    """Wait at most ``limit_s`` seconds for all other threads that run native code."""
    own = threading.get_ident()
    with _ended:
        _ended.wait_for(lambda: all(thread == own for thread in list(_running.values())), limit_s)


def end(limit_s: float) -> None:
    """Let no other thread begin to run native code any more, and `wait`, at interpreter exit."""
    global _exiting
    _exiting = threading.get_ident()  # before it looks which threads run: one that begins from now on sees it
    wait(limit_s)


def _end(token: object) -> None:
    with _ended:
        _running.pop(token, None)
        _ended.notify_all()


def _after_fork() -> None:
    global _ended, _exiting
    _exiting = 0
    _running.clear()
    _ended = threading.Condition()


os.register_at_fork(after_in_child=_after_fork)
