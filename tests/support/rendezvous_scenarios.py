"""Scenarios of the rendezvous: what ranks do to make their groups' communicators, and what must be true afterwards.

A scenario is made from a seed: 2 to 4 ranks, one to three groups, ranks that raise, die, come late, are not scheduled
for a while, call again after an error or although the others do not, and stores that fail. `Run` runs one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from dtcomm.errors import CollectiveTimeout, DtcommError
from dtcomm.runtime.bootstrap.rendezvous import Rendezvous, StoreExchange
from dtcomm.runtime.process_groups import Deadline
from tests.support.interleaved_ranks import InterleavedStore, Scheduler, Task, simulated

TIMEOUTS = (0.02, 0.05, 0.12)  # seconds
LONG = 30.0  # a timeout that no rank meets
# Store operations of a call after its deadline. It waits no more, and completes attempts to which all others have come.
MOST_LATE_STEPS = 120
_CONNECT_POLL_S = 1e-3
FIRST_RANK = 10  # ranks and positions in groups are different numbers


class Fault(Exception):
    """What a rank raises while it makes a communicator."""


@dataclass
class Call:
    """One call of one rank: how it ended."""

    rank: int
    group: int
    number: int  # of this rank's calls on this group
    fault: int | None = None  # in which round the rank raises
    epochs: list[int] = field(default_factory=list)  # all that it took part in
    infos: list[list[dict[str, Any]]] | None = None  # what it exchanged, if it succeeded
    error: BaseException | None = None
    ended: bool = False  # not if the rank died in it


@dataclass
class Scenario:
    """What the ranks do.

    Attributes:
        ranks: How many there are.
        groups: The members of each group.
        timeouts: The timeout of each group.
        calls: For each rank and group: when it calls, and the round in which it raises, if it does.
        threaded: Whether a rank uses each of its groups in a thread of its own.
        knows: Whether ranks know each other's processes.
        dies_after: The steps until a rank dies.
        store_fails_at: When the store fails.
        stall: For how long a rank may not be scheduled.
        restarts: Whether ranks that have died start again in the end.
        connects: Whether ranks also wait for each other outside the store, as they do to connect.
    """

    ranks: int
    groups: list[list[int]]
    timeouts: list[float]
    calls: dict[tuple[int, int], list[tuple[float, int | None]]]
    threaded: bool
    knows: bool
    dies_after: dict[int, int]
    store_fails_at: float
    stall: float
    restarts: bool
    connects: bool


def scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    chance = random.Random(seed)
    ranks = chance.randint(2, 4)
    everyone = [FIRST_RANK + rank for rank in range(ranks)]
    groups = [everyone]
    groups += [sorted(chance.sample(everyone, chance.randint(2, ranks))) for _ in range(chance.randint(0, 2))]
    timeouts = [chance.choice(TIMEOUTS) for _ in groups]
    faulty, late, extra = chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.3
    calls: dict[tuple[int, int], list[tuple[float, int | None]]] = {}
    for number, members in enumerate(groups):
        count = chance.randint(1, 2)
        for rank in members:
            calls[rank, number] = [
                (
                    chance.random() * 1.5 * timeouts[number] if late and chance.random() < 0.4 else 0.0,
                    chance.randint(0, 2) if faulty and chance.random() < 0.3 else None,
                )
                for _ in range(count + (extra and chance.random() < 0.4))
            ]
    dies = {rank: chance.randint(0, 80) for rank in everyone if chance.random() < 0.1}
    return Scenario(
        ranks=ranks,
        groups=groups,
        timeouts=timeouts,
        calls=calls,
        threaded=chance.random() < 0.5,
        knows=chance.random() < 0.5,
        dies_after=dies,
        store_fails_at=chance.random() * 0.1 if chance.random() < 0.03 else float("inf"),
        stall=chance.choice((0.0, 0.01, 0.2)),
        restarts=chance.random() < 0.5,
        connects=chance.random() < 0.5,
    )


class Run:
    """One run of a scenario: first with its faults, then all ranks that live make all groups again without any."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.what = scenario(seed)
        chance = random.Random(f"{seed}/order")
        self.scheduler = Scheduler(chance, self.what.stall, trace)
        self.store = InterleavedStore(self.scheduler)
        self.calls: list[Call] = []
        self.wrong: list[str] = []
        self._died: set[int] = set()
        self._connecting: dict[tuple[int, int], set[int]] = {}  # the ranks that connect, by group and epoch

    def run(self) -> list[str]:
        """Return what is wrong, each as a sentence."""
        what, scheduler = self.what, self.scheduler
        scheduler.dies_after = dict(what.dies_after)
        self.store.fails_at = what.store_fails_at
        with simulated(scheduler, lambda rank, other: what.knows):
            self._with_faults()
            self._judge(self.calls)
            if self.store.fails_at < float("inf"):
                return self.wrong
            scheduler.dies_after, scheduler.longest_stall = {}, 0.0
            self._died = set(scheduler.dead)
            if what.restarts:
                scheduler.dead.clear()
            sizes = [self._without_faults(again) for again in range(2)]
        self._judge_keys(sizes)
        return self.wrong

    # --- what ranks do ------------------------------------------------------------------------

    def _with_faults(self) -> None:
        tasks = []
        for rank in range(FIRST_RANK, FIRST_RANK + self.what.ranks):
            groups = [number for number, members in enumerate(self.what.groups) if rank in members]
            random.Random(f"{rank}/{self.what.timeouts}").shuffle(groups)
            threads = [[number] for number in groups] if self.what.threaded else [groups]
            tasks += [Task(rank, self._use(numbers)) for numbers in threads]
        self.scheduler.run(tasks)

    def _use(self, groups: list[int]) -> Callable[[Task], None]:
        def use(task: Task) -> None:
            for number in groups:
                for late, fault in self.what.calls[task.rank, number]:
                    self.scheduler.sleep(late)
                    call = self._call(task, number, fault, self.what.timeouts[number])
                    if call.error is not None:  # once more, as programs do
                        self._call(task, number, None, self.what.timeouts[number])

        return use

    def _without_faults(self, again: int) -> int:
        """Make every group whose ranks live. Return how many keys the store holds then."""
        alive = [
            number
            for number, members in enumerate(self.what.groups)
            if not any(rank in self.scheduler.dead for rank in members)
        ]
        made: list[Call] = []

        def use(task: Task) -> None:
            for number in alive:
                if task.rank not in self.what.groups[number]:
                    continue
                errors = []
                for _ in range(5):
                    call = self._call(task, number, None, LONG)
                    if call.error is None:
                        made.append(call)
                        break
                    errors.append(f"{type(call.error).__name__}: {call.error}")
                    if again:
                        self.wrong.append(f"rank {task.rank}: an error after all ranks had met: {errors[0]}")
                else:
                    self.wrong.append(
                        f"rank {task.rank} does not meet the others in group {number}: {errors}"
                    )

        ranks = range(FIRST_RANK, FIRST_RANK + self.what.ranks)
        self.scheduler.run([Task(rank, use) for rank in ranks if rank not in self.scheduler.dead])
        self._judge(made)
        return len(self.store.keys)

    def _call(self, task: Task, number: int, fault: int | None, timeout: float) -> Call:
        """Make a communicator of a group as `dtcomm.runtime.bootstrap.cpu` does: in two rounds or three."""
        members = self.what.groups[number]
        earlier = sum(call.rank == task.rank and call.group == number for call in self.calls)
        call = Call(task.rank, number, earlier, fault)
        self.calls.append(call)
        position = members.index(task.rank)
        deadline = Deadline(timedelta(seconds=timeout))
        meeting = Rendezvous(self.store, f"group {number}", position, members, deadline)  # type: ignore[arg-type]
        task.deadline, task.late_steps = self.scheduler.now + timeout, 0
        task.late_waits = 0
        rounds = 2 + number % 2
        kept: list[Any] = []  # what attempts returned and was not discarded

        def attempt(exchange: StoreExchange) -> list[list[dict[str, Any]]]:
            call.epochs.append(meeting.epoch)
            infos = []
            for which in range(rounds):
                if fault == which:
                    raise Fault("broken")
                if which == 1 and self.what.connects:
                    self._connect(task, number, meeting.epoch, exchange, deadline)
                info = {"epoch": meeting.epoch, "round": which, "rank": task.rank, "call": earlier}
                infos.append(exchange.all_gather(info))
            kept.append(infos)
            return infos

        self.scheduler.note(f"call {earlier} on group {number}")
        try:
            call.infos = meeting.run(attempt, kept.remove)
        except Exception as error:
            call.error = error
        call.ended = True
        self.scheduler.note(f"ends with {call.error!r}" if call.error else f"has made epoch {meeting.epoch}")
        if task.late_waits > 1:  # one may have been decided on before the deadline
            self.wrong.append(f"rank {task.rank} waited {task.late_waits} times after its deadline")
        if len(kept) != (call.error is None):
            self.wrong.append(f"rank {task.rank} kept {len(kept)} communicators, and got {call.error!r}")
        if task.late_steps > MOST_LATE_STEPS:
            self.wrong.append(f"rank {task.rank} took {task.late_steps} steps after its deadline")
        task.deadline = float("inf")
        return call

    def _connect(
        self, task: Task, number: int, epoch: int, exchange: StoreExchange, deadline: Deadline
    ) -> None:
        """Wait until all ranks of the group do so, or until the deadline."""
        connecting = self._connecting.setdefault((number, epoch), set())
        connecting.add(task.rank)
        while len(connecting) < len(self.what.groups[number]) and deadline.left_s():
            exchange.check()
            self.scheduler.sleep(min(_CONNECT_POLL_S, deadline.left_s()))

    # --- what must be true --------------------------------------------------------------------

    def _judge(self, calls: list[Call]) -> None:
        met: dict[tuple[int, int], dict[int, Call]] = {}
        for call in calls:
            if call.infos is not None:
                met.setdefault((call.group, call.epochs[-1]), {})[call.rank] = call
            if call.error is not None:
                self._judge_error(call)
        for (number, epoch), by_rank in met.items():
            members = self.what.groups[number]
            for rank, call in by_rank.items():
                for which, infos in enumerate(call.infos or []):
                    found = [(info["rank"], info["epoch"], info["round"]) for info in infos]
                    if found != [(member, epoch, which) for member in members]:
                        self.wrong.append(f"rank {rank} met {found} in epoch {epoch} of group {number}")
            if any(call.infos != next(iter(by_rank.values())).infos for call in by_rank.values()):
                self.wrong.append(f"ranks got different values in epoch {epoch} of group {number}")
            absent = [rank for rank in members if rank not in by_rank and rank not in self.scheduler.dead]
            if absent and self.store.fails_at == float("inf"):
                self.wrong.append(
                    f"ranks {sorted(by_rank)} made group {number} in epoch {epoch}, and ranks {absent} did not"
                )

    def _judge_error(self, call: Call) -> None:
        error = call.error
        text = f"rank {call.rank}: {type(error).__name__}: {error}"
        if isinstance(error, Fault):
            if call.fault is None:
                self.wrong.append(f"{text}: another rank raised it")
            return
        if not isinstance(error, DtcommError):
            self.wrong.append(text)
            return
        if self.store.fails_at < float("inf"):
            return
        members = self.what.groups[call.group]
        guilty = set(self.scheduler.dead)
        guilty |= {
            other.rank for other in self.calls if other.group == call.group and other.fault is not None
        }
        if isinstance(error, CollectiveTimeout):
            guilty |= set(members) - {call.rank}
        elif call.rank in guilty:
            guilty -= {call.rank} - set(self.scheduler.dead)
        if not any(f"{rank}" in str(error) for rank in guilty & set(members)):
            self.wrong.append(f"{text}: does not name one of {sorted(guilty)}")

    def _judge_keys(self, sizes: list[int]) -> None:
        if sizes[1:] != sizes[:-1]:
            self.wrong.append(f"the number of keys in the store changes when groups are made again: {sizes}")
        if not self._died:
            kept = ("/epoch", "/error", "/late", "/entered/", "/version/")
            left = sorted(key for key in self.store.keys if not any(part in key for part in kept))
            if left:
                self.wrong.append(f"keys are left in the store: {left}")


def report(seed: int) -> str:
    """Run the scenario of a seed again; return what it is, a line for each store operation, and what was wrong."""
    run = Run(seed, trace=True)
    wrong = run.run()
    again = f"again: python -m tests.stress.rendezvous --first {seed} --seeds 1"
    return "\n".join([f"seed {seed}: {run.what}", *run.scheduler.trace, *wrong, again])
