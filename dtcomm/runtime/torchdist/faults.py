"""Faults over torch.distributed: which rank caused one, and a thread that notices it early.

Before a rank gives up it records in the store which rank it waited for. A rank that waits for a rank that has given up
itself is held up by the rank at the end of that chain (`FaultAttribution`).

Gloo fails a message that it is just writing or reading only at the timeout, also where the other rank has died. So a
thread looks at runtimes whose messages the host waits for, while operations run (`watch`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import torch

from dtcomm.errors import CollectiveTimeout, DtcommError, PeerLost
from dtcomm.work import completion

MAX_TAG = 2**31 - 1
GRACE_SECONDS = 0.3  # for the records of ranks that gave up at the same time
STORE_SECONDS = (
    1.0  # that a question to the store may take; a store without its file or its server may take minutes
)
T = TypeVar("T")
_KINDS: dict[str, type[DtcommError]] = {"timeout": CollectiveTimeout, "lost": PeerLost}
_INTERRUPTED = "dtcomm/interrupted"

LOOK_S = 0.25
MAX_LOOK_S = 5.0  # much longer than a look at a store that does not answer

_log = logging.getLogger("dtcomm")
_lock = threading.Lock()
_looking = threading.RLock()  # held while the thread refers to runtimes
_watched: set[Watched] = set()


class FaultAttribution:
    """Turns a backend's error about one peer into an error about the rank that caused it.

    ``store`` is where ranks record whom they gave up on; None: the group's own store, if it has one.
    """

    def __init__(self, group: Any, names: Sequence[str], timeout_s: float, store: Any = None) -> None:
        self._rank = group.rank()
        self._names = names
        self._timeout_s = timeout_s
        self._store = _store_of(group) if store is None else store
        self._question: Future[Any] = Future()  # the last one to the store
        self._question.set_result(None)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout that errors mention."""
        self._timeout_s = seconds

    def gave_up(self, peer: int) -> bool:
        """Whether a rank has recorded that it gave up on another one."""
        return self._ask(lambda store: bool(store.check([_key(peer)])), False)

    def interrupt(self) -> DtcommError:
        """Record that a wait of this rank was interrupted; returns the error of `interruption`."""
        self._ask(lambda store: store.set(_INTERRUPTED, str(self._rank)), None)
        return self._interruption(self._rank)

    def interruption(self) -> DtcommError | None:
        """The error if a rank has recorded that it was interrupted, whichever rank is waited for."""
        rank = self._ask(
            lambda store: int(store.get(_INTERRUPTED)) if store.check([_INTERRUPTED]) else -1, -1
        )
        return None if rank < 0 else self._interruption(rank)

    def _interruption(self, rank: int) -> DtcommError:
        return DtcommError(f"{self._names[rank]} was interrupted while it waited for the others")

    def error(self, peer: int, cause: RuntimeError, context: str) -> DtcommError:
        """The error to raise for a backend's error about a message with ``peer``."""
        kind = "timeout" if "timed out" in str(cause).lower() else "lost"
        found = (peer, kind)
        peer, kind = self._ask(lambda store: self._follow_wait_chain(store, *found), found)
        reason = str(cause).splitlines()[0].rpartition("] ")[2]
        if kind == "timeout":
            what = f"did not come within {self._timeout_s:g} s"
            hint = "; all ranks must make the same calls in the same order: DTCOMM_CHECK=1 compares them"
        else:
            what, hint = "is gone", ""
        return _KINDS[kind](f"{self._names[peer]} {what} ({context}: {reason}){hint}")

    def _ask(self, question: Callable[[Any], T], default: T) -> T:
        """What ``question`` returns of the store; ``default`` if the store is gone or does not answer in time."""
        store, previous = self._store, self._question
        if store is None or wait([previous], STORE_SECONDS).not_done:
            return default
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(question(store))
            except BaseException as error:
                answer.set_exception(error)

        self._question = answer
        completion.start_thread(ask, "dtcomm-store")
        if wait([answer], STORE_SECONDS + GRACE_SECONDS).not_done:
            return default
        try:
            return answer.result()
        except (RuntimeError, ValueError):  # the store is gone with its rank
            return default

    def _follow_wait_chain(self, store: Any, peer: int, kind: str) -> tuple[int, str]:
        store.set(_key(self._rank), f"{kind} {peer}")
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            culprit, culprit_kind, seen = peer, kind, {self._rank}
            while culprit not in seen and store.check([_key(culprit)]):
                seen.add(culprit)
                culprit_kind, _, following = store.get(_key(culprit)).decode().partition(" ")
                culprit = int(following)
            if culprit in seen:  # all ranks of the chain are alive and wait for each other
                culprit, culprit_kind = peer, "timeout"
            if time.monotonic() >= deadline:
                return culprit, culprit_kind
            time.sleep(0.02)


def connection_error(group: Any, peer: int, error: RuntimeError) -> RuntimeError:
    """The reason for a failed wait for ``peer``: ``error``, or a lost connection if that is why time ran out.

    When a connection ends, Gloo fails the messages that wait for their match but not the one that it is just writing
    or reading, which runs into the timeout. A new message on the connection fails at once.
    """
    if group is not None and "timed out" in str(error).lower():
        unused = torch.empty(1, dtype=torch.uint8)  # no rank sends with this tag
        try:
            group.recv([unused], peer, MAX_TAG)
        except RuntimeError as ended:
            return error if "timeout" in str(ended).lower() else ended
    return error


def _key(rank: int) -> str:
    return f"dtcomm/gave_up/{rank}"


def _store_of(group: Any) -> Any:
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):  # a backend without a group, or a torch that does not tell
        return None


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
