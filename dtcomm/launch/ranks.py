"""Run a function as n ranks: processes with torch.distributed up, one deadline, and nothing left behind.

``run_ranks`` returns each rank's result or re-raises the first failure; ``spawn_ranks`` hands out the
processes for tests that kill or stop them. Importing torch takes longer than most tests, so ranks come from a
pool of processes that have it imported; one that failed, hung or was killed is never used again.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from dtcomm.launch.process_pool import Pool, RankError, RankProcess, environment
from dtcomm.launch.worker import STACK_SIGNAL, Report, Task, tell

__all__ = ["Outcome", "RankError", "RankTimeout", "Ranks", "run_ranks", "spawn_ranks", "tell"]

GRACE_SECONDS = 2.0  # after a first failure, for the others to report theirs
SHUTDOWN_SECONDS = 10.0  # for destroying the process group once all have reported


class RankTimeout(RankError):
    """A rank did not return before the deadline and was killed; the message shows where it stood."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended: ``ok`` with ``result``, with ``exception``, dead with ``exitcode``, or ``timed_out``.

    ``exitcode`` follows subprocess (``-9``: killed by SIGKILL); None for a rank that went back to the pool.
    ``seconds`` is how long after the start the rank reported or died.
    """

    rank: int
    ok: bool = False
    result: Any = None
    exception: BaseException | None = None
    traceback: str = ""
    exitcode: int | None = None
    timed_out: bool = False
    seconds: float = 0.0

    def failure(self) -> str:
        """One line that says what went wrong."""
        if self.timed_out:
            return f"rank {self.rank} did not return within {self.seconds:.1f} s and was killed"
        if self.traceback:
            return f"rank {self.rank} raised {self.traceback.strip().splitlines()[-1]}"
        if self.exitcode is not None and self.exitcode < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.exitcode).name}"
        when = "after" if self.ok else "before"
        return f"rank {self.rank} exited with code {self.exitcode} {when} it returned"


_pool = Pool()


class Ranks:
    """The processes of one run. As a context manager it leaves none of them behind, whatever happened."""

    def __init__(self, processes: list[RankProcess], directory: Path, reuse: bool) -> None:
        self._processes = processes
        self._directory = directory
        self._reuse = reuse
        self._start = time.monotonic()
        self._outcomes: dict[int, Outcome] = {}
        for rank, process in enumerate(processes):
            process.send((str(directory), rank))

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [process.pid for process in self._processes]

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Send ``sig`` to one rank; a rank that is already dead is left alone."""
        if self._processes[rank].alive():
            os.kill(self._processes[rank].pid, sig)

    def hear(self, rank: int, timeout: float = 60.0) -> object:
        """The next message that ``rank`` sent with ``tell``; RankTimeout where none comes in time."""
        process, deadline = self._processes[rank], time.monotonic() + timeout
        while True:
            if (word := process.word()) is not None:
                process.put_back(word)
            if process.heard:
                return process.heard.popleft()
            left = deadline - time.monotonic()
            if word is not None or left <= 0 or not process.alive():
                raise RankTimeout(f"rank {rank} said nothing within {timeout:g} s, or ended without a word")
            wait(process.events, left)

    def join(self, timeout: float | None = 60.0, *, grace: float | None = None) -> list[Outcome]:
        """Wait until every rank has returned, raised or died, and say how each ended.

        Those that have not by ``timeout`` seconds from now (None: no limit), or by ``grace`` seconds after
        the first failure, are killed.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while waiting := [r for r in range(len(self._processes)) if r not in self._outcomes]:
            for rank in waiting:
                self._look(rank)
            if grace is not None and any(not outcome.ok for outcome in self._outcomes.values()):
                deadline, grace = min(deadline, time.monotonic() + grace), None
            waiting = [r for r in waiting if r not in self._outcomes]
            left = deadline - time.monotonic()
            if waiting and left <= 0:
                self._give_up(waiting)
            elif waiting:
                objects = [event for rank in waiting for event in self._processes[rank].events]
                wait(objects, None if left == float("inf") else left)
        return self._finish()

    def _look(self, rank: int) -> None:
        process, seconds = self._processes[rank], time.monotonic() - self._start
        alive = process.alive()  # before the word: a rank may report and die at once
        if process.word() == "done":
            report: Report = pickle.loads((self._directory / f"result.{rank}").read_bytes())
            if report.ok:
                assert report.value is not None
                result = pickle.loads(report.value)
                self._outcomes[rank] = Outcome(rank=rank, ok=True, result=result, seconds=seconds)
            else:
                error = None if report.value is None else pickle.loads(report.value)
                self._outcomes[rank] = Outcome(
                    rank=rank, exception=error, traceback=report.traceback, seconds=seconds
                )
        elif not alive:
            self._outcomes[rank] = Outcome(rank=rank, exitcode=process.exitcode(), seconds=seconds)

    def _give_up(self, ranks: list[int]) -> None:
        states = {rank: self._processes[rank].state() for rank in ranks}
        for rank in ranks:
            self.kill(rank, STACK_SIGNAL)
        time.sleep(0.2)  # for the stacks to be written
        for rank in ranks:
            path = self._directory / f"stack.{rank}"
            where = path.read_text() if path.exists() else ""
            self._outcomes[rank] = Outcome(
                rank=rank,
                timed_out=True,
                traceback="the process was stopped" if states[rank] == "T" else where,
                exitcode=self._processes[rank].end(),
                seconds=time.monotonic() - self._start,
            )

    def _finish(self) -> list[Outcome]:
        outcomes = [self._outcomes[rank] for rank in range(len(self._processes))]
        clean = [rank for rank, outcome in enumerate(outcomes) if outcome.ok]
        for rank in clean:
            self._processes[rank].send(self._reuse)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for rank in clean:
            process = self._processes[rank]
            if self._reuse and process.expect("ready", deadline):
                _pool.give(process)
                continue
            if not self._reuse:
                wait([process.pidfd], max(0.0, deadline - time.monotonic()))
            outcomes[rank] = Outcome(**{**vars(outcomes[rank]), "exitcode": process.end()})
        for rank in set(range(len(outcomes))) - set(clean):
            self._processes[rank].end()
        self._processes = []
        shutil.rmtree(self._directory, ignore_errors=True)
        return outcomes

    def close(self) -> None:
        """Kill and reap whatever runs still."""
        for process in self._processes:
            process.end()
        self._processes = []
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def spawn_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    fresh: bool = False,
    env: Mapping[str, str | None] | None = None,
    group_timeout: float = 60.0,
) -> Ranks:
    """Start ``fn(rank, world_size, *args)`` in ``world_size`` processes and return them running.

    ``fn`` must be importable (a function at the top of a module). ``backend`` None starts no process group;
    ``group_timeout`` is the group's, in seconds. Ranks see the caller's environment with ``env`` on top (None
    unsets); what a module reads once at import needs ``fresh`` processes.
    """
    global _pool
    try:
        payload = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"fn and args must be picklable, fn a top-level function: {error}") from error
    if not _pool.mine():  # forked: the processes in it answer to the parent
        _pool = Pool()
    module = sys.modules[fn.__module__]
    task = Task(
        world_size=world_size,
        backend=backend,
        group_timeout=group_timeout,
        environment=environment(env),
        path=list(sys.path),
        module=fn.__module__,
        module_file=getattr(module, "__file__", None),
        payload=payload,
    )
    directory = Path(tempfile.mkdtemp(prefix="dtcomm-ranks-"))
    try:
        (directory / "task").write_bytes(pickle.dumps(task))
        return Ranks(_pool.take(world_size, fresh), directory, reuse=not fresh)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float | None = 60.0,
    backend: str | None = "gloo",
    fresh: bool = False,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Each rank's ``fn(rank, world_size, *args)``, in rank order; see ``spawn_ranks`` for what a rank is.

    If a rank fails, the others get two seconds to end and are killed. What is raised is the failed rank's own
    exception, its traceback as the cause; ``RankError`` where the process died; ``RankTimeout`` after
    ``timeout`` seconds (start-up not counted). A death comes before exceptions, these being mostly its
    consequence.
    """
    limit = 3600.0 if timeout is None else timeout
    with spawn_ranks(
        fn, world_size, *args, backend=backend, fresh=fresh, env=env, group_timeout=limit
    ) as ranks:
        outcomes = ranks.join(timeout, grace=GRACE_SECONDS)
    failures = [o for o in outcomes if not o.ok or o.exitcode]
    if failures:
        _raise(sorted(failures, key=_precedence))
    return [outcome.result for outcome in outcomes]


def _precedence(outcome: Outcome) -> tuple[int, float]:
    died = outcome.exitcode is not None and not outcome.timed_out
    return (0 if died else 1 if outcome.traceback and not outcome.timed_out else 2, outcome.seconds)


def _raise(failures: list[Outcome]) -> None:
    first = failures[0]
    summary = [failure.failure() for failure in failures]
    traces = [f"\nrank {failure.rank}:\n{failure.traceback}" for failure in failures if failure.traceback]
    detail = "\n".join(summary + traces)
    if first.timed_out:
        raise RankTimeout(detail)
    if first.exception is not None:
        raise first.exception from RankError(detail)
    raise RankError(detail)
