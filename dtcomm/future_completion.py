"""The threads that complete futures: those of the native engine's operations, and others whose callbacks may block.

Handles in ``dtcomm.work`` use it; ``dtcomm.runtime.communicator_cache`` stops it at interpreter exit.
"""

from __future__ import annotations

import itertools
import os
import queue
from collections.abc import Callable
from typing import Any

from dtcomm import _C
from dtcomm.completion_threads import CompletionThreads

_tickets = itertools.count(1)
_awaiting_completion: dict[int, Callable[[], None]] = {}


def notify(operation: _C.NativeWork, complete: Callable[[], None]) -> int:
    """Call ``complete`` on a completion thread when the operation has ended; returns a ticket for `cancel`."""
    ticket = next(_tickets)
    _awaiting_completion[ticket] = complete
    _completions.expect()
    _C.notify(operation, ticket)
    return ticket


def cancel(ticket: int) -> None:
    """Forget a call of `notify` that the engine has cancelled."""
    _awaiting_completion.pop(ticket, None)


def _take_finished() -> Callable[[], None] | None:
    while (ticket := _C.next_completion()) is not None:
        complete = _awaiting_completion.pop(
            ticket, None
        )  # None in a forked child: an operation of its parent
        if complete is not None:
            return complete
    return None


_completions = CompletionThreads("dtcomm-futures", _take_finished, lambda: bool(_awaiting_completion))
_detached: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
_callbacks = CompletionThreads("dtcomm-callbacks", lambda: _detached.get(), lambda: not _detached.empty())
_abandoned: list[Any] = []


def call_detached(call: Callable[[], None]) -> None:
    """Call something that runs callbacks on a thread that may block."""
    _detached.put(call)
    _callbacks.expect()


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
    # A child completes no future of its parent, and keeps the handles so that nothing of them is finalized.
    global _detached
    _abandoned.extend((*_awaiting_completion.values(), _detached))
    _awaiting_completion.clear()
    _detached = queue.SimpleQueue()


os.register_at_fork(after_in_child=_after_fork)
