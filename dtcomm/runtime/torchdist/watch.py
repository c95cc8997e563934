"""A thread that looks at runtimes whose messages the host waits for, while operations run.

Gloo fails a message that it is just writing or reading only at the timeout, also where the other rank has died.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Protocol

from dtcomm.work import completion

LOOK_S = 0.25
MAX_LOOK_S = 5.0  # much longer than a look at a store that does not answer

_log = logging.getLogger("dtcomm")
_lock = threading.Lock()
_looking = threading.RLock()  # held while the thread refers to runtimes
_watched: set[Watched] = set()


class Watched(Protocol):
    """What is looked at."""

    def busy(self) -> bool:
        """Whether an operation is running."""

    def look(self) -> None:
        """Look at the running operation."""


def watch(runtime: Watched) -> None:
    """Call ``look`` of a runtime, which is busy, every quarter of a second as long as it is."""
    if runtime in _watched:
        return
    with _lock:
        starts = not _watched
        _watched.add(runtime)
    if starts:
        threading.Thread(target=_look, name="dtcomm-watch", daemon=True).start()


def forget(runtime: Watched) -> None:
    """Look at a runtime no more; returns when the thread does not refer to it.

    Otherwise the thread could be the last to refer to the runtime's group and store. The destructor of a FileStore
    whose file has been removed meanwhile waits for the file until the store's timeout and holds the interpreter's lock.
    """
    with _lock:
        _watched.discard(runtime)
    if _looking.acquire(timeout=MAX_LOOK_S):
        _looking.release()


def _look() -> None:
    while True:
        time.sleep(LOOK_S)
        with completion.running_native(), _looking:  # looks use the store, whose functions are native
            busy = _look_at_all()
        if not busy:
            return


def _look_at_all() -> bool:
    """Look at all watched runtimes; whether one of them is still busy."""
    for runtime in list(_watched):
        try:
            runtime.look()
        except Exception:  # the others are looked at all the same
            _log.exception("looking at an operation that runs over a process group failed")
    with _lock:
        idle = [runtime for runtime in _watched if not runtime.busy()]
        _watched.difference_update(idle)
        # One that has become busy just before has found itself watched.
        _watched.update(runtime for runtime in idle if runtime.busy())
        return bool(_watched)


def _after_fork() -> None:
    global _lock, _looking
    _lock, _looking = threading.Lock(), threading.RLock()
    _watched.clear()


os.register_at_fork(after_in_child=_after_fork)
