"""Time that an operation spends encoding, summing and decoding; measured only while a timeline is recorded."""

from __future__ import annotations

import threading
import time

from dtcomm import _C
from dtcomm.work import Span

_lock = threading.Lock()
_users = 0


def add_users(count: int) -> None:
    """Register (1) or remove (-1) a timeline; operations take times if they start while there is one."""
    global _users
    with _lock:
        _users += count
        _C.enable_phase_times(_users > 0)


def enabled() -> bool:
    """Whether operations that start now take times."""
    return _users > 0


class PhaseTimer:
    """The phases of an operation that runs in Python."""

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}

    def add(self, phase: str, begin_ns: int) -> None:
        """Note that a piece of the phase ran from ``begin_ns`` until now."""
        end = time.monotonic_ns()
        span = self._spans.get(phase, Span(phase, begin_ns, end, 0))
        self._spans[phase] = span._replace(end_ns=end, busy_ns=span.busy_ns + end - begin_ns)

    def spans(self) -> list[Span]:
        """The phases so far."""
        return list(self._spans.values())
