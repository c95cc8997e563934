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
_exiting = 0  # the thread that has called `begin_exit`
_HOLD_SECONDS = 10.0  # much longer than an interpreter takes to be finalized


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


def wait(limit_s: float) -> None:
    """Wait at most ``limit_s`` seconds for all other threads that run native code."""
    own = threading.get_ident()
    with _ended:
        _ended.wait_for(lambda: all(thread == own for thread in list(_running.values())), limit_s)


def begin_exit() -> None:
    """Say that the interpreter exits in this thread: others that run no native code now are held before they do."""
    global _exiting
    _exiting = threading.get_ident()


def hold_at_exit() -> None:
    """Hold the calling thread if the interpreter exits, unless it runs native code that `wait` waits for.

    To be called before an error is raised in a thread that the exit wakes: it would release its tensors while the
    interpreter is finalized. The process ends meanwhile. If the thread is waited for all the same, by a function of
    atexit, it goes on after ten seconds.
    """
    own = threading.get_ident()
    if _exiting not in (0, own) and own not in list(_running.values()):
        threading.Event().wait(_HOLD_SECONDS)


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
