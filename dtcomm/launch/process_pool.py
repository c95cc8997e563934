"""Rank processes as `dtcomm.launch.ranks` sees them, and the pool of idle ones."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dtcomm.launch.fork_server import STARTUP_SECONDS, ForkServer, ForkServerError

POOL_SIZE = 8
_PYTEST_VARIABLE = "PYTEST_CURRENT_TEST"  # pytest changes this variable for every test


class RankError(RuntimeError):
    """A rank died before it returned, or raised an exception that cannot be pickled; the message names the rank."""


def environment(env: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return the ranks' environment: the caller's, with Gloo on loopback and one OpenMP thread, updated by ``env``."""
    merged = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ, **(env or {})}
    return {name: value for name, value in merged.items() if value is not None}


class RankProcess:
    """A rank process, seen from its parent.

    It leads a process group, so that its own child processes are killed with it.
    """

    def __init__(self, fork_server: ForkServer, rank: int) -> None:
        self.rank = rank
        self.connection, child_end = Pipe()
        self._fork_server = fork_server
        self._ended: int | None = None
        try:
            self.pid = fork_server.fork(child_end.fileno())
        except BaseException:
            self.connection.close()
            raise
        finally:
            child_end.close()
        # A socket stays open while a forked child of the rank holds it; a pidfd reports the exit at once.
        self.pidfd = os.pidfd_open(self.pid)
        self.events: list[Any] = [self.connection, self.pidfd]  # objects for multiprocessing.connection.wait
        self.messages: deque[object] = deque()
        self._statuses: deque[str] = deque()

    def alive(self) -> bool:
        return not select.select([self.pidfd], [], [], 0)[0]

    def push_back_status(self, status: str) -> None:
        """Return a status to the front of the queue of `next_status`."""
        self._statuses.appendleft(status)

    def next_status(self) -> str | None:
        """Return the next status ("ready" or "done") that has arrived, if any; user messages go to ``messages``."""
        try:
            while self.events[0] is self.connection and self.connection.poll():
                kind, message = self.connection.recv()
                if kind == "message":
                    self.messages.append(message)
                else:
                    self._statuses.append(kind)
        except (EOFError, OSError):
            self.events = [self.pidfd]  # a closed socket would end every wait at once
        return self._statuses.popleft() if self._statuses else None

    def wait_for_status(self, status: str, deadline: float) -> bool:
        """Wait for ``status``; return False if the rank dies or the deadline passes first."""
        while self.next_status() != status:
            if not self.alive():
                return self.next_status() == status
            if time.monotonic() >= deadline:
                return False
            wait(self.events, max(0.0, deadline - time.monotonic()))
        return True

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the pidfd reports a dead rank
            self.connection.send(message)

    def state(self) -> str:
        """Return the letter of the process state in /proc, for example ``T`` for stopped."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "?"

    def exitcode(self) -> int:
        """Return the exit code of a dead rank without reaping it, so that its child processes stay alive."""
        return self._fork_server.exitcode(self.pid) if self._ended is None else self._ended

    def kill_and_reap(self) -> int:
        """Kill what is left of the process group, reap the rank and return its exit code."""
        if self._ended is None:
            self._ended = self._fork_server.kill_and_reap(self.pid)
            os.close(self.pidfd)
            self.connection.close()
        return self._ended


class ProcessPool:
    """Pool of idle rank processes that have imported torch and dtcomm, and the fork server they come from.

    A process is always the same rank: torch caches specs of DTensors whose meshes hold the coordinates of the rank for
    which they were made, and would save a checkpoint with the other rank's offsets.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.RLock()  # several threads may run ranks
        self._idle: list[RankProcess] = []
        self._fork_server: ForkServer | None = None
        atexit.register(self.close)

    def acquire(self, count: int, fresh: bool) -> list[RankProcess]:
        """Return ready processes of all ranks, idle ones unless ``fresh``; RankError if some do not start."""
        processes: list[RankProcess] = []
        started: list[RankProcess] = []
        try:
            for rank in range(count):
                process = None if fresh else self._take_idle(rank)
                if process is None:
                    process = RankProcess(self._current_fork_server(fresh), rank)
                    started.append(process)
                processes.append(process)
            deadline = time.monotonic() + STARTUP_SECONDS
            if not all(process.wait_for_status("ready", deadline) for process in started):
                raise ForkServerError("a rank process did not start; its error is on stderr")
        except ForkServerError as error:
            for process in processes:
                process.kill_and_reap()
            self._retire_fork_server()
            raise RankError(str(error)) from error
        return processes

    def _take_idle(self, rank: int) -> RankProcess | None:
        """Remove and return a live idle process of ``rank``, if there is one."""
        with self._lock:
            for process in [process for process in self._idle if process.rank == rank]:
                self._idle.remove(process)
                if process.alive():
                    return process
                process.kill_and_reap()
        return None

    def _current_fork_server(self, fresh: bool) -> ForkServer:
        """Return the fork server; for fresh processes, one that was started with the current environment."""
        current = {name: value for name, value in environment(None).items() if name != _PYTEST_VARIABLE}
        with self._lock:
            if fresh and self._fork_server is not None and self._fork_server.environment != current:
                self._retire_fork_server()
            if self._fork_server is None:
                self._fork_server = ForkServer(current)
            return self._fork_server

    def _retire_fork_server(self) -> None:
        fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            fork_server.shut_down_when_idle()

    def release(self, process: RankProcess) -> None:
        """Keep a process for later runs, or end it if the pool is full."""
        with self._lock:
            if len(self._idle) < POOL_SIZE:
                process.messages.clear()
                self._idle.append(process)
                return
        process.kill_and_reap()

    def owned_by_this_process(self) -> bool:
        """Return False in a process forked from the pool's owner."""
        return self._owner == os.getpid()

    def close(self) -> None:
        while self.owned_by_this_process() and self._idle:
            self._idle.pop().kill_and_reap()
        if self.owned_by_this_process():
            self._retire_fork_server()
