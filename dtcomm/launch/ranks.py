"""Run a function on several ranks of this machine: local processes with an initialized process group.

`run_ranks` returns every rank's result or raises the first failure. `spawn_ranks` returns the running processes, for
callers that send signals to ranks or exchange messages with them. Both enforce a deadline and leave no process behind.

Ranks come from a pool of processes that have already imported torch, since the import takes longer than most runs. A
process that failed, hung or was killed is not reused.
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

from dtcomm.launch.process_pool import ProcessPool, RankError, RankProcess, environment
from dtcomm.launch.worker import STACK_SIGNAL, Task, TaskResult, send_to_parent

__all__ = [
    "RankError",
    "RankOutcome",
    "RankTimeout",
    "RunningRanks",
    "run_ranks",
    "send_to_parent",
    "spawn_ranks",
]

GRACE_SECONDS = 2.0  # time for the other ranks to report after a first failure
SHUTDOWN_SECONDS = 10.0  # time to destroy the process group after all ranks have reported


class RankTimeout(RankError):
    """A rank did not return before the deadline and was killed; the message contains its stack."""


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """How a rank ended.

    Attributes:
        exception: What it raised, if that can be pickled.
        traceback: The traceback of the exception, or the stack of a rank that timed out.
        exitcode: Exit code as in subprocess (-9: killed by SIGKILL); None if the process went back to the pool.
        timed_out: Whether the rank was killed at the deadline.
        seconds: Seconds from the start until the rank reported or died.
    """

    rank: int
    ok: bool = False
    result: Any = None
    exception: BaseException | None = None
    traceback: str = ""
    exitcode: int | None = None
    timed_out: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        """How the rank ended, with the whole traceback."""
        summary = f"rank {self.rank} returned {self.result!r}" if self.ok else self.describe_failure()
        return f"{summary}\n{self.traceback}" if self.traceback else summary

    def describe_failure(self) -> str:
        """Return one line that describes the failure."""
        if self.timed_out:
            return f"rank {self.rank} did not return within {self.seconds:.1f} s and was killed"
        if self.traceback:
            return f"rank {self.rank} raised {self.traceback.strip().splitlines()[-1]}"
        if self.exitcode is not None and self.exitcode < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.exitcode).name}"
        when = "after" if self.ok else "before"
        return f"rank {self.rank} exited with code {self.exitcode} {when} it returned"


_pool = ProcessPool()


class RunningRanks:
    """The rank processes of one run, as returned by `spawn_ranks`; with ``reuse`` they return to the pool.

    As a context manager it kills whatever still runs at the end of the block.
    """

    def __init__(self, processes: list[RankProcess], directory: Path, reuse: bool) -> None:
        self._processes = processes
        self._directory = directory
        self._reuse = reuse
        self._start = time.monotonic()
        self._outcomes: dict[int, RankOutcome] = {}
        for rank, process in enumerate(processes):
            process.send((str(directory), rank))

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [process.pid for process in self._processes]

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Send signal ``sig`` to a rank, unless the rank is already dead."""
        if self._processes[rank].alive():
            os.kill(self._processes[rank].pid, sig)

    def receive(self, rank: int, timeout: float = 60.0) -> object:
        """Return the next message that ``rank`` sent with `send_to_parent`.

        RankTimeout if none came within ``timeout`` seconds, or the rank ended without sending one.
        """
        process, deadline = self._processes[rank], time.monotonic() + timeout
        while True:
            if (status := process.next_status()) is not None:
                process.push_back_status(status)
            if process.messages:
                return process.messages.popleft()
            left = deadline - time.monotonic()
            if status is not None or left <= 0 or not process.alive():
                raise RankTimeout(f"rank {rank} sent no message within {timeout:g} s, or ended without one")
            wait(process.events, left)

    def join(self, timeout: float | None = 60.0, *, grace: float | None = None) -> list[RankOutcome]:
        """Wait until every rank has returned, raised or died; return the outcome of each.

        Remaining ranks are killed ``timeout`` seconds from now, or ``grace`` seconds after the first failure; None: no
        limit.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while waiting := [r for r in range(len(self._processes)) if r not in self._outcomes]:
            for rank in waiting:
                self._poll(rank)
            if grace is not None and any(not outcome.ok for outcome in self._outcomes.values()):
                deadline, grace = min(deadline, time.monotonic() + grace), None
            waiting = [r for r in waiting if r not in self._outcomes]
            left = deadline - time.monotonic()
            if waiting and left <= 0:
                self._kill_timed_out(waiting)
            elif waiting:
                objects = [event for rank in waiting for event in self._processes[rank].events]
                wait(objects, None if left == float("inf") else left)
        return self._finish()

    def _poll(self, rank: int) -> None:
        process, seconds = self._processes[rank], time.monotonic() - self._start
        alive = process.alive()  # checked before the status: a rank may report and exit at once
        if process.next_status() == "done":
            task_result: TaskResult = pickle.loads((self._directory / f"result.{rank}").read_bytes())
            if task_result.ok:
                assert task_result.value is not None
                result = pickle.loads(task_result.value)
                self._outcomes[rank] = RankOutcome(rank=rank, ok=True, result=result, seconds=seconds)
            else:
                error = None if task_result.value is None else pickle.loads(task_result.value)
                self._outcomes[rank] = RankOutcome(
                    rank=rank, exception=error, traceback=task_result.traceback, seconds=seconds
                )
        elif not alive:
            self._outcomes[rank] = RankOutcome(rank=rank, exitcode=process.exitcode(), seconds=seconds)

    def _kill_timed_out(self, ranks: list[int]) -> None:
        states = {rank: self._processes[rank].state() for rank in ranks}
        for rank in ranks:
            self.kill(rank, STACK_SIGNAL)
        time.sleep(0.2)  # time for the ranks to write their stacks
        for rank in ranks:
            path = self._directory / f"stack.{rank}"
            stack = path.read_text() if path.exists() else ""
            self._outcomes[rank] = RankOutcome(
                rank=rank,
                timed_out=True,
                traceback="the process was stopped" if states[rank] == "T" else stack,
                exitcode=self._processes[rank].kill_and_reap(),
                seconds=time.monotonic() - self._start,
            )

    def _finish(self) -> list[RankOutcome]:
        outcomes = [self._outcomes[rank] for rank in range(len(self._processes))]
        clean = [rank for rank, outcome in enumerate(outcomes) if outcome.ok]
        for rank in clean:
            self._processes[rank].send(self._reuse)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for rank in clean:
            process = self._processes[rank]
            if self._reuse and process.wait_for_status("ready", deadline):
                _pool.release(process)
                continue
            if not self._reuse:
                wait([process.pidfd], max(0.0, deadline - time.monotonic()))
            outcomes[rank] = RankOutcome(**{**vars(outcomes[rank]), "exitcode": process.kill_and_reap()})
        for rank in set(range(len(outcomes))) - set(clean):
            self._processes[rank].kill_and_reap()
        self._processes = []
        shutil.rmtree(self._directory, ignore_errors=True)
        return outcomes

    def close(self) -> None:
        """Kill and reap all processes that still run."""
        for process in self._processes:
            process.kill_and_reap()
        self._processes = []
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> RunningRanks:
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
) -> RunningRanks:
    """Start ``fn(rank, world_size, *args)`` in ``world_size`` processes and return while they run.

    Args:
        fn: A function at the top level of an importable module, or of the script that runs.
        world_size: Number of ranks.
        *args: Picklable arguments.
        backend: Backend of the process group that each rank initializes first; None for no process group.
        fresh: Start new processes instead of pooled ones. Needed if a module reads a variable of ``env`` at import.
        env: Environment variables set in the ranks in addition to the caller's; None as a value unsets one.
        group_timeout: Timeout of the process group in seconds.

    Returns:
        The running processes; use it as a context manager.

    Raises:
        TypeError: ``fn`` or ``args`` cannot be pickled.
        RankError: The processes could not be started.

    Example:
        with spawn_ranks(train, 2) as ranks:
            ranks.kill(1)
            outcomes = ranks.join(timeout=30)
    """
    global _pool
    try:
        payload = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"fn and args must be picklable, fn a top-level function: {error}") from error
    if not _pool.owned_by_this_process():  # a forked process must not use its parent's pool
        _pool = ProcessPool()
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
        return RunningRanks(_pool.acquire(world_size, fresh), directory, reuse=not fresh)
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
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` ranks of this machine and return their results.

    If a rank fails, the others get two seconds to finish and are then killed. If several ranks fail, a process that
    died takes precedence over exceptions, since these are mostly its consequence.

    Args:
        fn: A function at the top level of an importable module, or of the script that runs.
        world_size: Number of ranks.
        *args: Picklable arguments.
        timeout: Seconds until all ranks must have returned, not counting their start; None for no limit.
        backend: Backend of the process group that each rank initializes first; None for no process group.
        fresh: Start new processes instead of pooled ones. Needed if a module reads a variable of ``env`` at import.
        env: Environment variables set in the ranks in addition to the caller's; None as a value unsets one.

    Returns:
        The results in rank order.

    Raises:
        RankError: A rank died.
        RankTimeout: A rank did not return in time; the message contains its stack.
        Exception: The exception that a rank raised, with the rank's traceback as its cause.

    Example:
        >>> from operator import add
        >>> from dtcomm.launch import run_ranks
        >>> run_ranks(add, 2, backend=None)  # add(rank, world_size)
        [2, 3]
    """
    limit = 3600.0 if timeout is None else timeout
    options: dict[str, Any] = {"backend": backend, "fresh": fresh, "env": env}
    # The limit of the run ends first, so that the error names the ranks that did not return.
    with spawn_ranks(fn, world_size, *args, group_timeout=2 * limit, **options) as ranks:
        outcomes = ranks.join(timeout, grace=GRACE_SECONDS)
    failures = [o for o in outcomes if not o.ok or o.exitcode]
    if failures:
        _raise_failure(sorted(failures, key=_precedence))
    return [outcome.result for outcome in outcomes]


def _precedence(outcome: RankOutcome) -> tuple[int, float]:
    died = outcome.exitcode is not None and not outcome.timed_out
    return (0 if died else 1 if outcome.traceback and not outcome.timed_out else 2, outcome.seconds)


def _raise_failure(failures: list[RankOutcome]) -> None:
    first = failures[0]
    summary = [failure.describe_failure() for failure in failures]
    traces = [f"\nrank {failure.rank}:\n{failure.traceback}" for failure in failures if failure.traceback]
    detail = "\n".join(summary + traces)
    if first.timed_out:
        raise RankTimeout(detail)
    if first.exception is not None:
        raise first.exception from RankError(detail)
    raise RankError(detail)
