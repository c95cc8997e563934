"""The flight recorder: every rank keeps its last operations in memory and writes them to a file when one fails.

Ranks write one JSON file each into DTCOMM_FLIGHT_DIR; ``dtcomm doctor --flight DIR`` compares them and names the rank
that held up the others. The runtimes keep the operations; this module turns them into JSON, so it is not on the path of
a call.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dtcomm.errors import CommunicatorClosed
from dtcomm.system import write_file

FORMAT = 1
CAPACITY = 256  # operations of a communicator that are kept, as in csrc/engine/flight_recorder.h
STAGES = ("issued", "started", "done", "failed")


@dataclass
class FlightEntry:
    """One operation; ``number`` counts those of the communicator from 1.

    ``text`` is the operation as error messages show it, ``details`` the same as JSON values. Times are on the clock of
    ``time.monotonic_ns``; 0 if ``stage``, one of ``STAGES``, was not reached. ``waiting_for`` is the group rank that it
    waits for, or -1, and ``waited_for`` are those that it has waited for.
    """

    number: int
    text: str
    details: dict[str, Any]
    stage: str = "issued"
    issued_ns: int = 0
    started_ns: int = 0
    finished_ns: int = 0
    waiting_for: int = -1
    waited_for: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PeerSnapshot:
    """What shared memory shows of a rank: its last operation, the rank it waits for, and whether its process lives."""

    last: int
    text: str
    pieces: int
    waiting_for: int
    alive: bool
    closed: bool


class Recorder:
    """The ring of operations of a runtime that is written in Python."""

    def __init__(self) -> None:
        self._ring: deque[FlightEntry] = deque(maxlen=CAPACITY)
        self._issued = 0

    def issue(self, text: str, details: dict[str, Any]) -> FlightEntry:
        """The entry of a new operation."""
        self._issued += 1
        entry = FlightEntry(self._issued, text, details, issued_ns=time.monotonic_ns())
        self._ring.append(entry)
        return entry

    def list(self) -> list[FlightEntry]:
        """The entries, oldest first."""
        return list(self._ring)


class Recorded(Protocol):
    """A communicator, as far as the flight recorder reads it."""

    @property
    def global_rank(self) -> int:
        """The rank of this process in the default group."""

    def record(self) -> dict[str, Any]:
        """The communicator's identity, failure and last operations."""


# By id. Every access is one operation of a dict, so that a record can be made while other threads make groups, and
# while the garbage collector closes some.
_recorded: dict[int, weakref.ref[Recorded]] = {}


def add(communicator: Recorded) -> None:
    """Include a communicator in every later record."""
    key = id(communicator)
    _recorded[key] = weakref.ref(communicator, lambda _: _recorded.pop(key, None))


def drop(communicator: Recorded) -> None:
    """Exclude a communicator from later records."""
    _recorded.pop(id(communicator), None)


def record(reason: str = "") -> dict[str, Any]:
    """The record of all communicators of this process, as JSON values."""
    communicators = [made for reference in list(_recorded.values()) if (made := reference()) is not None]
    rank = communicators[0].global_rank if communicators else int(os.environ.get("RANK", "0"))
    return {
        "format": FORMAT,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written": time.time(),
        "reason": reason,
        "communicators": sorted(
            (communicator.record() for communicator in communicators), key=lambda made: str(made["id"])
        ),
    }


def write(directory: str | Path, reason: str = "") -> Path:
    """Write the record to ``rank-<n>.json`` atomically; OSError if that is not possible.

    The folder may be shared with other users: the file is readable by this user alone, and symbolic links in the folder
    are not followed.
    """
    contents = record(reason)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{contents['rank']}.json"
    write_file(path, json.dumps(contents, indent=1), mode=0o600)
    return path


def failed(reason: BaseException) -> None:
    """Write the record of a failure to DTCOMM_FLIGHT_DIR, if that is set. Closing is no failure. Never raises."""
    directory = os.environ.get("DTCOMM_FLIGHT_DIR")  # it was checked when the communicator was made
    if not directory or isinstance(reason, CommunicatorClosed):
        return
    try:
        write(directory, f"{type(reason).__name__}: {reason}")
    except Exception as problem:  # it must not replace the failure
        with contextlib.suppress(Warning):  # where warnings are errors
            warnings.warn(f"DTCOMM_FLIGHT_DIR={directory!r}: no flight record: {problem!r}", stacklevel=2)


def describe(entries: list[FlightEntry], ranks: list[int]) -> list[dict[str, Any]]:
    """Operations as JSON values, with times in seconds of the wall clock and global ranks."""
    offset = time.time_ns() - time.monotonic_ns()

    def wall_clock(stamp: int) -> float | None:
        return (stamp + offset) * 1e-9 if stamp else None

    return [
        {
            "number": entry.number,
            "text": entry.text,
            **entry.details,
            "state": entry.stage,
            "issued": wall_clock(entry.issued_ns),
            "started": wall_clock(entry.started_ns),
            "finished": wall_clock(entry.finished_ns),
            "waiting_for": ranks[entry.waiting_for]
            if entry.stage in ("started", "failed") and entry.waiting_for >= 0
            else None,
            "waited_for": [ranks[peer] for peer in entry.waited_for],
        }
        for entry in entries
    ]


def _after_fork() -> None:
    # The communicators are the parent's: a child cannot read their memory, and their operations are not its own.
    _recorded.clear()


os.register_at_fork(after_in_child=_after_fork)
