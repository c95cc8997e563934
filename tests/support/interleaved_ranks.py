"""Ranks as threads of which one runs at a time, chosen by a seeded random generator at every use of the store.

A run depends on its seed alone: the same seed gives the same order of all store operations, on a clock that moves only
with them. Product code is run unchanged; only its clock and its look at processes are replaced.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from dtcomm.errors import PeerLost
from dtcomm.runtime import process_groups
from dtcomm.runtime.bootstrap import rendezvous

_MOST_STEPS = 50_000  # of one run; ranks that need more never end
_STALL_CHANCE = 0.01  # that a rank is not scheduled for a while, at each step
_LATENCY_S = 200e-6  # longest time of one step


class Died(BaseException):
    """The process of the rank has ended: it does nothing more."""


class Endless(BaseException):
    """The ranks have taken more steps than any run needs."""


class Task:
    """A thread of a rank.

    Attributes:
        rank: Its rank.
        deadline: When its call is to end; steps after that are counted.
        late_steps: How many those were.
        late_waits: How often it slept after its deadline.
    """

    def __init__(self, rank: int, function: Callable[[Task], None]) -> None:
        self.rank = rank
        self.deadline = float("inf")
        self.late_steps = 0
        self.late_waits = 0
        self.wakes_at = 0.0
        self.turn = threading.Lock()
        self.turn.acquire()
        self.function = function
        self.ended = False


class Scheduler:
    """Runs tasks one step at a time.

    Attributes:
        now: The time in seconds.
        trace: One line for each step, if asked for.
        dead: The ranks whose processes have ended, and when.
        dies_after: The steps until a rank dies.
        current: The task that runs.
        longest_stall: See the argument.
        steps: How many there were.

    Args:
        chance: Decides what runs next, and for how long.
        longest_stall: Seconds that a rank may not be scheduled for; 0: it is never kept from running.
        trace: Whether to record the steps.
    """

    def __init__(self, chance: random.Random, longest_stall: float, trace: bool = False) -> None:
        self.now = 0.0
        self.trace: list[str] = []
        self.dead: dict[int, float] = {}
        self.dies_after: dict[int, int] = {}
        self.current: Task | None = None
        self.longest_stall = longest_stall
        self._chance = chance
        self._tracing = trace
        self._tasks: list[Task] = []
        self.steps = 0
        self._error: BaseException | None = None
        self._all_ended = threading.Event()

    def run(self, tasks: list[Task]) -> None:
        """Run tasks until all have ended; raise what one of them raised that is not `Died`."""
        self._tasks = list(tasks)
        self._all_ended.clear()
        threads = [threading.Thread(target=self._main, args=(task,), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        self._hand_over()
        self._all_ended.wait()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _main(self, task: Task) -> None:
        task.turn.acquire()
        try:
            task.function(task)
        except Died:
            pass
        except BaseException as error:
            self._error = self._error or error
        self._tasks.remove(task)
        self._hand_over()

    def _hand_over(self) -> None:
        """Let the next task run."""
        if not self._tasks:
            self._all_ended.set()
            return
        self.current = self._next()
        self.current.turn.release()

    def _next(self) -> Task:
        ready = [task for task in self._tasks if task.wakes_at <= self.now]
        if not ready:
            self.now = min(task.wakes_at for task in self._tasks)
            ready = [task for task in self._tasks if task.wakes_at <= self.now]
        return ready[int(self._chance.random() * len(ready))]

    def step(self) -> None:
        """Called by the running task before each of its actions: let others run."""
        task = self.current
        assert task is not None
        chance = self._chance.random
        self.steps += 1
        if self.steps > _MOST_STEPS or self._error is not None:
            raise Endless(f"more than {_MOST_STEPS} steps")
        self.now += chance() * _LATENCY_S
        if self.longest_stall and chance() < _STALL_CHANCE:
            task.wakes_at = self.now + chance() * self.longest_stall
        following = self._next()
        if following is not task:
            self.current = following
            following.turn.release()
            task.turn.acquire()
        if task.rank in self.dies_after:
            self.dies_after[task.rank] -= 1
            if self.dies_after[task.rank] < 0 and task.rank not in self.dead:
                self.dead[task.rank] = self.now
                self.note("dies")
        if task.rank in self.dead:
            raise Died
        if self.now > task.deadline:
            task.late_steps += 1

    def sleep(self, seconds: float) -> None:
        """Let others run until some time has passed."""
        assert self.current is not None
        self.current.late_waits += self.now > self.current.deadline
        self.current.wakes_at = self.now + seconds
        self.step()

    def monotonic(self) -> float:
        """The time in seconds."""
        return self.now

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        if self._tracing:
            rank = "" if self.current is None else f"rank {self.current.rank}"
            self.trace.append(f"{self.now * 1e3:9.3f} ms  {rank}: {text}")


class InterleavedStore:
    """A store in memory with the operations and results of TCPStore; before each, another rank may run.

    Attributes:
        keys: What it holds.
        fails_at: When its process ends.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.keys: dict[str, str] = {}
        self.fails_at = float("inf")
        self._scheduler = scheduler

    def add(self, key: str, amount: int) -> int:
        self._step()
        value = int(self.keys.get(key, "0")) + amount
        self.keys[key] = str(value)
        return self._noted(f"add {key} {amount}", value)

    def check(self, keys: list[str]) -> bool:
        self._step()
        return self._noted(f"check {' '.join(keys)}", all(key in self.keys for key in keys))

    def set(self, key: str, value: str) -> None:
        self._step()
        self.keys[key] = value
        self._noted(f"set {key} {value}", None)

    def get(self, key: str) -> bytes:
        self._step()
        return self._noted(f"get {key}", self.keys[key].encode())  # TCPStore would wait for ever: KeyError

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._step()
        if self.keys.get(key, "") == expected:
            self.keys[key] = desired
        value = self.keys.get(key, expected)
        return self._noted(f"compare_set {key} {expected} {desired}", value.encode())

    def delete_key(self, key: str) -> bool:
        self._step()
        return self._noted(f"delete {key}", self.keys.pop(key, None) is not None)

    def _step(self) -> None:
        self._scheduler.step()
        if self._scheduler.now >= self.fails_at:
            self._scheduler.note("the store has failed")
            raise RuntimeError("Broken pipe")

    def _noted(self, text: str, result: Any) -> Any:
        self._scheduler.note(f"{text} -> {result!r}")
        return result


@contextmanager
def simulated(scheduler: Scheduler, knows: Callable[[int, int], bool]) -> Iterator[None]:
    """Run the rendezvous on a scheduler's clock, with its processes.

    Args:
        scheduler: Runs the ranks.
        knows: Whether a rank knows the process of another.
    """

    def require_alive(ranks: Any) -> None:
        scheduler.step()
        assert scheduler.current is not None
        for rank in ranks:
            if rank in scheduler.dead and knows(scheduler.current.rank, rank):
                raise PeerLost(f"rank {rank} is gone: its process ended")

    with (
        mock.patch.object(rendezvous, "time", scheduler),
        mock.patch.object(process_groups, "time", scheduler),
        mock.patch.object(rendezvous, "time", scheduler),
        mock.patch.object(process_groups, "time", scheduler),
        mock.patch.object(rendezvous.processes, "require_alive", require_alive),
    ):
        yield
