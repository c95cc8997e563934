"""What a schedule asks of ranks, links and processors, step by step: all that its time depends on.

``profile`` reads it off the schedule, or, where the algorithm is symmetric, off one chunk's way, so that it reaches
100,000 ranks. Chunks count as equal: loads are in chunks, sizes come later.
"""

from __future__ import annotations

import functools
from collections import Counter
from itertools import groupby
from typing import Any, NamedTuple

from dtcomm import algorithms
from dtcomm.planner import symmetric_traffic
from dtcomm.planner.symmetric_traffic import Way, Ways
from dtcomm.schedule.ir import Schedule, Transfer

#: Schedules with up to about this many transfers are written out and read; beyond, symmetry is needed.
MOST_TRANSFERS = 20_000


class Load(NamedTuple):
    """The busiest rank's loads within one step, in chunks.

    ``inside`` and ``between``: what one rank sends, or receives, on the links within its host and to other hosts;
    ``host``: the same of all ranks of a host together, to other hosts. Every chunk is a message. ``encode``: what one
    rank encodes; ``decode``: what it reads, decodes and adds or writes out.
    """

    inside: int = 0
    between: int = 0
    host: int = 0
    encode: int = 0
    decode: int = 0


class Profile(NamedTuple):
    """``loads`` with the number of steps that each is the load of, in no order; ``encodings`` as in
    ``Schedule.requantizations``.
    """

    collective: str
    ranks: int
    chunks: int
    loads: tuple[tuple[Load, int], ...]
    encodings: int

    @property
    def steps(self) -> int:
        return sum(count for _, count in self.loads)

    def total(self) -> Load:
        """The sum over all steps."""
        return Load(*(sum(load[at] * count for load, count in self.loads) for at in range(len(Load._fields))))


@functools.lru_cache(maxsize=256)
def profile(name: str, collective: str, ranks: int, per_host: int) -> Profile | None:
    """The profile of algorithm ``name`` on hosts of ``per_host`` ranks each, filled in order.

    None where the schedule is too large to be enumerated and nothing symmetric is known of it.
    """
    if ranks % per_host:
        raise ValueError(f"per_host: {per_host} does not divide {ranks} ranks")
    if (name, collective) == ("one_shot", "all_reduce"):
        return _one_shot(ranks, per_host)
    told = symmetric_traffic.ways(name, collective, ranks, per_host) if _large(ranks) else None
    if told is not None:
        return of_ways(told, per_host)
    if _transfers(name, collective, ranks) > MOST_TRANSFERS:
        return None
    hosts = (per_host,) * (ranks // per_host)
    return of_schedule(algorithms.build(name, collective, ranks, hosts=hosts), per_host)


def of_schedule(schedule: Schedule, per_host: int | None = None) -> Profile:
    """Every chunk's way read one after the other; by default all ranks share a host."""
    told = Ways(
        schedule=Schedule(
            collective=schedule.collective, ranks=schedule.ranks, chunks=schedule.chunks, root=schedule.root
        ),
        ways=lambda: symmetric_traffic._by_chunk(schedule),
    )
    return of_ways(told, schedule.ranks if per_host is None else per_host)


def of_ways(told: Ways, per_host: int) -> Profile:
    """Off the ways of some chunks, which stand for all."""
    reader = _Reader(told, per_host)
    for chunk, way in told.ways():
        reader.read(chunk, way)
    return reader.profile()


def _one_shot(ranks: int, per_host: int) -> Profile:
    # Everybody does the same, and one chunk's way is all of it: n (n - 1) transfers in one step.
    others, away = per_host - 1, ranks - per_host
    load = Load(others, away, away * per_host, 1, ranks)
    loads = ((load, 1),) if ranks > 1 else ()
    return Profile("all_reduce", ranks, 1, loads, int(ranks > 1))


def _large(ranks: int) -> bool:
    return ranks > 32


def _transfers(name: str, collective: str, ranks: int) -> int:
    # Roughly: a transfer for each rank and chunk, there and back.
    return 2 * ranks * ranks * (ranks.bit_length() if collective == "all_to_all" else 1)


class _Reader:
    """Counts what ways put on each rank, or on each class of ranks that carry the same."""

    def __init__(self, told: Ways, per_host: int) -> None:
        self._schedule, self._class_of = told.schedule, told.class_of
        self._ranks, self._per_host = told.schedule.ranks, per_host
        # All ranks may be alike because everybody goes on by one, which does not keep hosts apart.
        self._turns = told.turns
        self._steps = self._encodings = 0
        self._encode: Counter[tuple[int, int]] = Counter()  # (step, rank or class) → chunks
        self._decode: Counter[tuple[int, int]] = Counter()
        # (step, rank or class or host, whether it sends) → chunks
        self._inside: Counter[tuple[int, int, bool]] = Counter()
        self._between: Counter[tuple[int, int, bool]] = Counter()
        self._host: Counter[tuple[int, int, bool]] = Counter()
        self._distances: Counter[tuple[int, int]] = Counter()  # (step, how far a transfer goes) → transfers

    def read(self, chunk: int, way: Way) -> None:
        # What a rank holds: the step that made it (-1: an input), and whether its bytes are there already.
        held: dict[int, tuple[int, bool]] = {}
        copies: dict[int, int] = {}
        depth: dict[int, int] = {}
        of = self._class_of or _itself
        for step, transfers in groupby(sorted(way, key=_step), key=_step):
            self._steps = max(self._steps, step + 1)
            arriving: dict[int, tuple[int, int, bool]] = {}
            for t in transfers:
                self._move(step, t.src, t.dst)
                made, encoded = held.get(t.src, (-1, False))
                if not encoded:
                    held[t.src] = (made, True)
                    # A sum is encoded as it is made, an input when it is first sent.
                    self._encode[step if made < 0 else made, of(t.src)] += 1
                    depth[t.src] = depth.get(t.src, 0) + 1
                terms, deepest, _ = arriving.get(t.dst, (0, 0, False))
                arriving[t.dst] = (terms + 1, max(deepest, depth[t.src]), t.op == "reduce")
            for dst, (terms, deepest, adds) in arriving.items():
                self._encodings = max(self._encodings, deepest)
                held[dst] = (step, not adds)
                if adds:
                    self._decode[step, of(dst)] += terms + 1
                    depth[dst] = max(depth.get(dst, 0), deepest)
                    copies.pop(dst, None)
                else:
                    depth[dst] = deepest
                    copies[dst] = step
        for rank, step in copies.items():
            if self._schedule.ends(rank, chunk):
                self._decode[step, of(rank)] += 1

    def profile(self) -> Profile:
        encode, decode = _largest(self._encode), _largest(self._decode)
        wire = self._turned() if self._turns else self._counted()
        steps: Counter[Load] = Counter()
        for step in range(self._steps):
            steps[Load(*wire.get(step, (0, 0, 0)), encode.get(step, 0), decode.get(step, 0))] += 1
        schedule = self._schedule
        loads = tuple(sorted(steps.items()))
        return Profile(schedule.collective, schedule.ranks, schedule.chunks, loads, self._encodings)

    def _move(self, step: int, src: int, dst: int) -> None:
        if self._turns:
            self._distances[step, (dst - src) % self._ranks] += 1
            return
        of = self._class_of or _itself
        here, there = src // self._per_host, dst // self._per_host
        if here != there:
            self._host[step, here, True] += 1
            self._host[step, there, False] += 1
        side = self._inside if here == there else self._between
        side[step, of(src), True] += 1
        side[step, of(dst), False] += 1

    def _counted(self) -> dict[int, tuple[int, int, int]]:
        inside, between, host = map(_largest, (self._inside, self._between, self._host))
        if self._class_of is not None:
            host = {step: load * self._per_host for step, load in between.items()}
        return {
            step: (inside.get(step, 0), between.get(step, 0), host.get(step, 0))
            for step in range(self._steps)
        }

    def _turned(self) -> dict[int, tuple[int, int, int]]:
        # Everybody sends these distances; whether one leaves the host depends on the place in it. What a rank
        # receives mirrors what the one at the other end of its host sends.
        size, ranks = self._per_host, self._ranks
        found: dict[int, list[Counter[int]]] = {}
        for (step, distance), count in self._distances.items():
            inside, between = found.setdefault(step, [Counter(), Counter()])
            for place in range(size):
                stays = place + distance < size or place + distance >= ranks
                (inside if stays else between)[place] += count
        return {
            step: (
                max(inside.values(), default=0),
                max(between.values(), default=0),
                sum(between.values()),
            )
            for step, (inside, between) in found.items()
        }


def _largest(counts: Counter[Any]) -> dict[int, int]:
    # Step → the most that any rank, class or host has.
    most: dict[int, int] = {}
    for (step, *_), count in counts.items():
        if count > most.get(step, 0):
            most[step] = count
    return most


def _itself(rank: int) -> int:
    return rank


def _step(t: Transfer) -> int:
    return t.step
