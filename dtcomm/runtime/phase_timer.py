"""Time that an operation spends encoding, summing and decoding; measured only while a timeline is recorded."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from dtcomm import _C

PHASES = ("encode", "reduce", "decode")  # in the order of csrc/engine/phase_times.h


class Span(NamedTuple):
    """One phase of an operation over all of its pieces.

    ``begin_ns`` and ``end_ns`` are on the clock of ``time.monotonic_ns``, from the first piece's begin to the last
    piece's end; ``busy_ns`` is the time in between that the phase ran.
    """

    phase: str
    begin_ns: int
    end_ns: int
    busy_ns: int


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


def spans_of(native: Any) -> list[Span]:
    """The phases of a finished `_C.NativeWork` that took place."""
    return [
        Span(phase, *times) for phase, times in zip(PHASES, native.phase_times(), strict=True) if times[0]
    ]


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
