"""What a completed operation cost: bytes, times, and the times of its phases, which are taken only on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from dtcomm import _C

PHASES = ("encode", "reduce", "decode")  # in the order of csrc/engine/phase_times.h

_lock = threading.Lock()
_timelines = 0


class Span(NamedTuple):
    """One phase of an operation over all of its pieces.

    ``begin_ns`` and ``end_ns`` are on the clock of ``time.monotonic_ns``, from the first piece's begin to the last
    piece's end; ``busy_ns`` is the time in between that the phase ran.
    """

    phase: str
    begin_ns: int
    end_ns: int
    busy_ns: int


class Statistics(NamedTuple):
    """What a completed operation cost; the fields are the properties of `Work`."""

    wire_bytes: int = 0
    seconds: float | None = 0.0
    started_ns: int = 0
    finished_ns: int = 0

    @classmethod
    def total(cls, parts: Iterable[Statistics]) -> Statistics:
        """Add up bytes and seconds; the time is from the first start to the last end."""
        # One loop, since the DDP hook calls this for each stage of each bucket.
        wire_bytes, started_ns, finished_ns = 0, 0, 0
        seconds: float | None = 0.0
        for part_bytes, part_seconds, part_started_ns, part_finished_ns in parts:
            wire_bytes += part_bytes
            seconds = None if seconds is None or part_seconds is None else seconds + part_seconds
            if part_started_ns and (not started_ns or part_started_ns < started_ns):
                started_ns = part_started_ns
            if part_finished_ns > finished_ns:
                finished_ns = part_finished_ns
        return cls(wire_bytes, seconds, started_ns, finished_ns)


def add_timelines(count: int) -> None:
    """Register (1) or remove (-1) a timeline; operations take times if they start while there is one."""
    global _timelines
    with _lock:
        _timelines += count
        _C.enable_phase_times(_timelines > 0)


def takes_phase_times() -> bool:
    """Whether operations that start now take times."""
    return _timelines > 0


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
