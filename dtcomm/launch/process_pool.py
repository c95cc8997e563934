"""The processes behind :mod:`dtcomm.launch.ranks`: forked off the nursery, heard and ended; and the warm pool."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dtcomm.launch.fork_server import STARTUP_SECONDS, Nursery, NurseryError

POOL_SIZE = 8
_FLEETING = "PYTEST_CURRENT_TEST"  # pytest's own; nobody's setting


class RankError(RuntimeError):
    """A rank died before it returned, or raised what cannot be pickled; the message names the rank."""


def environment(env: Mapping[str, str | None] | None) -> dict[str, str]:
    """The caller's environment as ranks get it: Gloo on loopback, one thread each, ``env`` on top."""
    merged = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ, **(env or {})}
    return {name: value for name, value in merged.items() if value is not None}


class RankProcess:
    """One rank process, seen from the parent; it leads a process group, so that its children go with it."""

    def __init__(self, nursery: Nursery) -> None:
        self.connection, theirs = Pipe()
        self._nursery = nursery
        self._ended: int | None = None
        try:
            self.pid = nursery.fork(theirs.fileno())
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        # A socket shows no end while a forked child of the rank holds it; a pidfd does.
        self.pidfd = os.pidfd_open(self.pid)
        self.events: list[Any] = [self.connection, self.pidfd]  # what to wait for
        self.heard: deque[object] = deque()
        self._words: deque[str] = deque()

    def alive(self) -> bool:
        return not select.select([self.pidfd], [], [], 0)[0]

    def put_back(self, word: str) -> None:
        """Undo one ``word``."""
        self._words.appendleft(word)

    def word(self) -> str | None:
        """The next protocol word that has arrived, if any; what the rank told is put aside in ``heard``."""
        try:
            while self.events[0] is self.connection and self.connection.poll():
                kind, message = self.connection.recv()
                if kind == "tell":
                    self.heard.append(message)
                else:
                    self._words.append(kind)
        except (EOFError, OSError):
            self.events = [self.pidfd]  # a closed socket would wake every wait
        return self._words.popleft() if self._words else None

    def expect(self, word: str, deadline: float) -> bool:
        """Wait for ``word``; False where the rank died or the deadline passed first."""
        while self.word() != word:
            if not self.alive():
                return self.word() == word
            if time.monotonic() >= deadline:
                return False
            wait(self.events, max(0.0, deadline - time.monotonic()))
        return True

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # a dead rank is noticed by its pidfd
            self.connection.send(message)

    def state(self) -> str:
        """The letter of the process state: ``T`` is stopped."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "?"

    def exitcode(self) -> int:
        """The exit code of a rank that is dead, which stays unreaped: its children may be wanted alive."""
        return self._nursery.exitcode(self.pid) if self._ended is None else self._ended

    def end(self) -> int:
        """Kill what is left of the process group, reap, and return the exit code."""
        if self._ended is None:
            self._ended = self._nursery.end(self.pid)
            os.close(self.pidfd)
            self.connection.close()
        return self._ended


class Pool:
    """Idle processes that have imported torch and dtcomm, and the nursery they come from."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._idle: list[RankProcess] = []
        self._nursery: Nursery | None = None
        atexit.register(self.close)

    def take(self, count: int, fresh: bool) -> list[RankProcess]:
        taken: list[RankProcess] = []
        while not fresh and self._idle and len(taken) < count:
            process = self._idle.pop(0)
            if process.alive():
                taken.append(process)
            else:
                process.end()
        started: list[RankProcess] = []
        try:
            while len(taken) + len(started) < count:
                started.append(RankProcess(self._source(fresh)))
            deadline = time.monotonic() + STARTUP_SECONDS
            if not all(process.expect("ready", deadline) for process in started):
                raise NurseryError("a rank process did not start; its error is above, on stderr")
        except NurseryError as error:
            for process in taken + started:
                process.end()
            self._retire()
            raise RankError(str(error)) from error
        return taken + started

    def _source(self, fresh: bool) -> Nursery:
        """The nursery; for fresh processes one that was started in the environment of now."""
        now = {name: value for name, value in environment(None).items() if name != _FLEETING}
        if fresh and self._nursery is not None and self._nursery.environment != now:
            self._retire()
        if self._nursery is None:
            self._nursery = Nursery(now)
        return self._nursery

    def _retire(self) -> None:
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.retire()

    def give(self, process: RankProcess) -> None:
        if len(self._idle) < POOL_SIZE:
            process.heard.clear()
            self._idle.append(process)
        else:
            process.end()

    def mine(self) -> bool:
        return self._owner == os.getpid()

    def close(self) -> None:
        while self.mine() and self._idle:
            self._idle.pop().end()
        if self.mine():
            self._retire()
