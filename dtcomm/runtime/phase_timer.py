"""Where the time of an operation goes: encoding, sums, decoding. Nobody looks at a clock unless timelines want it."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from dtcomm import _C

PHASES = ("encode", "reduce", "decode")  # as csrc/engine/phase_times.h has them


class Span(NamedTuple):
    """One phase of an operation, over all of its pieces: from its first begin to its last end, and how much of that
    it ran; ``time.monotonic_ns``.
    """

    phase: str
    begin_ns: int
    end_ns: int
    busy_ns: int


_lock = threading.Lock()
_users = 0


def want(more: int) -> None:
    """One timeline more (1) or less (-1) in this process: operations that start from now on take their times."""
    global _users
    with _lock:
        _users += more
        _C.want_times(_users > 0)


def wanted() -> bool:
    return _users > 0


def of_native(native: Any) -> list[Span]:
    """The phases of a finished `_C.NativeWork` that took place."""
    return [Span(phase, *busy) for phase, busy in zip(PHASES, native.times(), strict=True) if busy[0]]


class Stopwatch:
    """The phases of an operation that runs in Python."""

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}

    def add(self, phase: str, begin_ns: int) -> None:
        """A piece of the phase ran from ``begin_ns`` till now."""
        end = time.monotonic_ns()
        before = self._spans.get(phase, Span(phase, begin_ns, end, 0))
        self._spans[phase] = before._replace(end_ns=end, busy_ns=before.busy_ns + end - begin_ns)

    def spans(self) -> list[Span]:
        return list(self._spans.values())
