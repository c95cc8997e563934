"""The flight recorder: every rank keeps its last operations, and writes them down when one fails.

Ranks write one JSON each into DTCOMM_FLIGHT_DIR; ``dtcomm doctor --flight DIR`` reads them together and says who is
missing what. Nothing here is on the path of a call: the runtimes keep the operations, this puts them into words.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dtcomm import env

FORMAT = 1
KEPT = 256  # operations of a communicator, as csrc/engine/flight_recorder.h
STAGES = ("issued", "started", "done", "failed")


@dataclass
class FlightEntry:
    """One operation: its number counts the communicator's calls from 1; times are ``time.monotonic_ns``, 0 for what
    has not come; ``waited_for`` are ranks of the group.
    """

    number: int
    text: str
    about: dict[str, Any]
    stage: str = "issued"
    issued_ns: int = 0
    started_ns: int = 0
    finished_ns: int = 0
    waiting_for: int = -1
    waited_for: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PeerSnapshot:
    """What a rank sees of another one in shared memory: its last operation, whether its process is there."""

    last: int
    text: str
    pieces: int
    waiting_for: int
    alive: bool
    closed: bool


class Recorder:
    """The ring of a runtime that is written in Python."""

    def __init__(self) -> None:
        self._ring: deque[FlightEntry] = deque(maxlen=KEPT)
        self._issued = 0

    def issue(self, text: str, details: dict[str, Any]) -> FlightEntry:
        """A new operation."""
        self._issued += 1
        flight = FlightEntry(self._issued, text, details, issued_ns=time.monotonic_ns())
        self._ring.append(flight)
        return flight

    def list(self) -> list[FlightEntry]:
        """Oldest first."""
        return list(self._ring)


class Recorded(Protocol):
    """A communicator, as far as it is recorded."""

    @property
    def global_rank(self) -> int:
        """Of this process, in the default group."""

    def record(self) -> dict[str, Any]:
        """Who it is, its failure, its last operations."""


_lock = threading.Lock()
_recorded: weakref.WeakSet[Any] = weakref.WeakSet()


def add(communicator: Recorded) -> None:
    """From now on the communicator is in every record."""
    _recorded.add(communicator)


def drop(communicator: Recorded) -> None:
    """It is gone, with nothing left to say."""
    _recorded.discard(communicator)


def record(reason: str = "") -> dict[str, Any]:
    """What this process knows of its communicators, as JSON values."""
    communicators: list[Recorded] = sorted(_recorded, key=lambda each: str(each.record()["id"]))
    rank = communicators[0].global_rank if communicators else int(os.environ.get("RANK", "0"))
    return {
        "format": FORMAT,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written": time.time(),
        "reason": reason,
        "communicators": [each.record() for each in communicators],
    }


def write(directory: str | Path, reason: str = "") -> Path:
    """Write the record to ``rank-<n>.json``, whole or not at all; OSError where that cannot be."""
    said = record(reason)
    folder = Path(directory)
    with _lock:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{said['rank']}.json"
        draft = folder / f".rank-{said['rank']}.{os.getpid()}"
        draft.write_text(json.dumps(said, indent=1))
        draft.replace(path)
    return path


def failed(reason: BaseException) -> None:
    """A communicator failed: leave word of it where DTCOMM_FLIGHT_DIR says. Never raises."""
    directory = env.get("DTCOMM_FLIGHT_DIR")
    if not directory:
        return
    try:
        write(directory, f"{type(reason).__name__}: {reason}")
    except OSError as problem:
        warnings.warn(f"DTCOMM_FLIGHT_DIR={directory!r}: no flight record: {problem}", stacklevel=2)


def describe(flights: list[FlightEntry], ranks: list[int]) -> list[dict[str, Any]]:
    """Operations as JSON values, times in seconds of the wall clock, ranks as global ones."""
    offset = time.time_ns() - time.monotonic_ns()

    def wall(stamp: int) -> float | None:
        return (stamp + offset) * 1e-9 if stamp else None

    said = []
    for flight in flights:
        under_way = flight.stage in ("started", "failed") and flight.waiting_for >= 0
        said.append(
            {
                "number": flight.number,
                "text": flight.text,
                **flight.about,
                "state": flight.stage,
                "issued": wall(flight.issued_ns),
                "started": wall(flight.started_ns),
                "finished": wall(flight.finished_ns),
                "waiting_for": ranks[flight.waiting_for] if under_way else None,
                "waited_for": [ranks[peer] for peer in flight.waited_for],
            }
        )
    return said
