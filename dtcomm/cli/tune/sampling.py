"""The clock of ``dtcomm tune``: contests are visited again and again, for a moment each, until the time is up.

A visit lets all algorithms of a contest take turns. What disturbs a machine for a second so disturbs one visit of
many, and their lower quartile is kept. CPUs that move nearer to each other or further apart change times by up to
two, so visits are told apart by where the CPUs were, and the contest that is known least where they are now is next.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.cli.tune import cpu_placement
from dtcomm.codecs import Codec
from dtcomm.planner.cost_model import PLACEMENTS

GROWTH = 100  # powers of two that a sum in place may grow by in a visit
CALLS, LEAST_CALLS = 30, 2  # of an algorithm in a visit, besides the first, which brings the ranks together
TURN = 2e-3  # seconds of an algorithm in a visit, unless its calls are longer
ENOUGH = 40  # visits of a contest in one placement
SETTLE_BYTES, SETTLE_CALLS = 2 << 20, 10  # after which the engine has looked where the CPUs are


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One collective with one codec at one size, in bytes of fp32, by several algorithms."""

    collective: str
    codec: Codec
    nbytes: int
    names: tuple[str, ...]


@dataclass(kw_only=True)
class Visits:
    """What one contest was found to take: by placement and algorithm the median of each visit, in seconds."""

    contest: Contest
    medians: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def seconds(self, placement: str) -> dict[str, float]:
        """By algorithm, the lower quartile of the visits."""
        return {name: quartile(found) for name, found in self.medians.get(placement, {}).items()}

    def anywhere(self) -> dict[str, float]:
        """The same of all visits, wherever the CPUs were."""
        return {
            name: quartile([one for by_name in self.medians.values() for one in by_name[name]])
            for name in self.contest.names
        }


def quartile(found: Sequence[float]) -> float:
    """The lower one, by rank."""
    return sorted(found)[(len(found) - 1) // 4]


def visit_all(
    contests: Sequence[Contest], seconds: float, cpus: Sequence[int], *, say: str = ""
) -> list[Visits]:
    """Visit all ``contests`` for so many seconds; all ranks call it, and all get the same.

    ``cpus``: whose distance matters (``placement.cpus``), none where it does not. What did not fit into the time has
    no medians. ``say``: what to show while it runs.
    """
    return _Tour(contests, cpus, say).run(seconds)


class _Tour:
    def __init__(self, contests: Sequence[Contest], cpus: Sequence[int], say: str) -> None:
        self._contests, self._cpus, self._say = contests, cpus, say
        self._safe = int(GROWTH / math.log2(dist.get_world_size())) - 2
        self._inputs = Inputs(max(contest.nbytes for contest in contests))
        self._visits: list[tuple[int, str]] = []  # (contest, placement)
        self._series: list[torch.Tensor] = []  # of this rank, a row an algorithm
        self._took: dict[int, float] = {}  # by contest, what a visit takes altogether
        self._each: dict[int, float] = {}  # and a call
        self._seen: Counter[tuple[int, str]] = Counter()

    def run(self, seconds: float) -> list[Visits]:
        begin, where = time.perf_counter(), None
        while True:
            left = seconds - (time.perf_counter() - begin)
            at, calls, now = _told(self._next(left) if dist.get_rank() == 0 else None)
            self._visits.append((at, now))
            if at < 0:
                break
            if now and now != where:
                self._inputs.settle()
            where = now
            started = time.perf_counter()
            self._series.append(self._visit(self._contests[at], calls))
            self._took[at] = time.perf_counter() - started
            self._each[at] = float(self._series[-1].median(dim=1).values.sum())
            self._seen[at, now] += 1
            self._show(1 - left / seconds)
        self._show(None)
        return self._found()

    def _next(self, left: float) -> tuple[int, int, str]:
        """Rank 0's choice: the contest (-1: none any more), calls of each algorithm, and where the CPUs are."""
        now = cpu_placement.placement(self._cpus)
        wanting = [
            at
            for at in range(len(self._contests))
            if self._seen[at, now] < ENOUGH and self._expected(at) <= left
        ]
        if not wanting or left <= 0:
            return -1, 0, now
        # All once, then the more often the less they take.
        at = min(wanting, key=lambda at: self._seen[at, now] * math.sqrt(self._took.get(at, 0.0)))
        turns = int(TURN * len(self._contests[at].names) / self._each.get(at, math.inf))
        return at, max(LEAST_CALLS, min(CALLS, self._safe, turns)), now

    def _expected(self, at: int) -> float:
        # Of a size that was not visited yet: in proportion to the one before.
        if at in self._took:
            return self._took[at]
        mine = self._contests[at]
        smaller = [
            took * mine.nbytes / other.nbytes
            for index, took in self._took.items()
            for other in (self._contests[index],)
            if (other.collective, other.codec) == (mine.collective, mine.codec) and other.nbytes < mine.nbytes
        ]
        return min(smaller, default=0.0)

    def _visit(self, contest: Contest, calls: int) -> torch.Tensor:
        series = []
        for name in contest.names:
            call, restore = self._inputs.call_of(contest, name)
            series.append(_timed(call, calls + 1)[1:])
            restore(calls + 1)
        return torch.tensor(series, dtype=torch.float64)

    def _found(self) -> list[Visits]:
        found = [Visits(contest=contest) for contest in self._contests]
        if not self._series:
            return found
        slowest = torch.cat([series.flatten() for series in self._series])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        parts = torch.split(slowest, [series.numel() for series in self._series])
        for (at, now), (_, later), part, mine in zip(
            self._visits, self._visits[1:], parts, self._series, strict=False
        ):
            if now != later:
                continue  # the CPUs moved meanwhile
            by_name = found[at].medians.setdefault(now, {})
            for name, row in zip(self._contests[at].names, part.view_as(mine).tolist(), strict=True):
                by_name.setdefault(name, []).append(statistics.median(row))
        return found

    def _show(self, share: float | None) -> None:
        if self._say and dist.get_rank() == 0:
            text = f"{self._say}: {share:4.0%}" if share is not None else ""
            print(f"\r{text:40}", end="" if text else "\r", file=sys.stderr, flush=True)


class Inputs:
    """Tensors of every size, which are slices of two that live as long as this: fresh ones cost more than a visit."""

    def __init__(self, largest: int) -> None:
        self._ranks = dist.get_world_size()
        numel = max(1, largest // 4, SETTLE_BYTES // 4)
        self._tensors = torch.empty(numel).normal_(), torch.empty(numel).normal_()

    def settle(self) -> None:
        """Lets the engine look where the CPUs are, as it does every so many bytes."""
        tensor = self._tensors[0][: SETTLE_BYTES // 4]
        for _ in range(SETTLE_CALLS):
            collectives.all_reduce(tensor, algorithm="direct")
        self._shrink(tensor, SETTLE_CALLS)

    def call_of(self, contest: Contest, name: str) -> tuple[Callable[[], Any], Callable[[int], None]]:
        """The call, and what restores its input after so many."""
        spec, numel = str(contest.codec), max(1, contest.nbytes // 4)
        first, second = self._tensors
        given: dict[str, Any] = {"codec": spec, "algorithm": name}
        match contest.collective:
            case "all_reduce":
                tensor = first[:numel]
                call = lambda: collectives.all_reduce(tensor, **given)  # noqa: E731
                return call, lambda calls: self._shrink(tensor, calls)
            case "broadcast":
                return (lambda: collectives.broadcast(first[:numel], 0, **given)), _leave
            case "reduce":  # the root's grows by one of the others' a call, which it can for long
                return (lambda: collectives.reduce(first[:numel], 0, **given)), _leave
        size = max(1, numel // self._ranks)
        whole, shard = first[: size * self._ranks], second[:size]
        root = dist.get_rank() == 0
        match contest.collective:
            case "reduce_scatter":
                return (lambda: collectives.reduce_scatter(shard, whole, **given)), _leave
            case "all_gather":
                return (lambda: collectives.all_gather(whole, shard, **given)), _leave
            case "all_to_all":
                other = second[: whole.numel()]
                return (lambda: collectives.all_to_all(other, whole, **given)), _leave
            case "gather":
                return (lambda: collectives.gather(shard, whole if root else None, 0, **given)), _leave
            case _:
                return (lambda: collectives.scatter(shard, whole if root else None, 0, **given)), _leave

    def _shrink(self, tensor: torch.Tensor, calls: int) -> None:
        # A sum in place multiplies by the number of ranks, once they are alike.
        tensor.mul_(float(self._ranks) ** -calls)


def _leave(calls: int) -> None:
    pass


def _timed(call: Callable[[], Any], count: int) -> list[float]:
    times = []
    last = time.perf_counter()
    for _ in range(count):
        call()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times


def _told(said: tuple[int, int, str] | None) -> tuple[int, int, str]:
    """What rank 0 says, on all ranks."""
    at, calls, where = said or (0, 0, "")
    words = torch.tensor([at, calls, PLACEMENTS.index(where)])
    dist.broadcast(words, 0)
    at, calls, index = words.tolist()
    return at, calls, PLACEMENTS[index]
