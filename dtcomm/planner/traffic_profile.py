"""The load that a schedule puts on ranks, links and processors, step by step: all that its time depends on.

`profile` reads the load from the schedule or, if the algorithm is symmetric, from one chunk's path, so that it works
for 100,000 ranks. Chunks count as equal: loads are in chunks, and the planner's `estimate` multiplies them by sizes.
"""

from __future__ import annotations

import functools
from collections import Counter
from itertools import groupby
from typing import Any, NamedTuple

from dtcomm import algorithms
from dtcomm.planner import symmetric_traffic
from dtcomm.planner.symmetric_traffic import ChunkPaths, Path
from dtcomm.schedule.ir import Schedule, Transfer

#: Schedules of up to about this many transfers are built and read; larger ones need symmetry.
MAX_TRANSFERS = 20_000


class StepLoad(NamedTuple):
    """The load of the busiest rank within one step, in chunks.

    ``inside`` and ``between``: what one rank sends, or receives, on the links within its host and to other hosts.
    ``host``: what all ranks of a host together send, or receive, to other hosts. Every chunk is a message. ``encode``:
    what one rank encodes. ``decode``: what it reads, decodes and sums or writes to the output.
    """

    inside: int = 0
    between: int = 0
    host: int = 0
    encode: int = 0
    decode: int = 0


class Profile(NamedTuple):
    """The loads of a schedule.

    ``loads`` are (load, number of steps with that load), in no order. ``encodings`` is `Schedule.requantizations`.
    """

    collective: str
    ranks: int
    chunks: int
    loads: tuple[tuple[StepLoad, int], ...]
    encodings: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        return sum(count for _, count in self.loads)

    def total(self) -> StepLoad:
        """Return the sum over all steps."""
        fields = range(len(StepLoad._fields))
        return StepLoad(*(sum(load[field] * count for load, count in self.loads) for field in fields))


@functools.lru_cache(maxsize=256)
def profile(name: str, collective: str, ranks: int, per_host: int) -> Profile | None:
    """Return the profile of an algorithm on hosts of ``per_host`` ranks each, filled in order.

    Returns None if the schedule is too large to be built and no symmetry of it is known.
    """
    if ranks % per_host:
        raise ValueError(f"per_host: {per_host} does not divide {ranks} ranks")
    if (name, collective) == ("one_shot", "all_reduce"):
        return _one_shot(ranks, per_host)
    paths = symmetric_traffic.chunk_paths(name, collective, ranks, per_host) if _large(ranks) else None
    if paths is not None:
        return profile_of_paths(paths, per_host)
    if _estimated_transfers(collective, ranks) > MAX_TRANSFERS:
        return None
    hosts = (per_host,) * (ranks // per_host)
    return profile_of_schedule(algorithms.build(name, collective, ranks, hosts=hosts), per_host)


def profile_of_schedule(schedule: Schedule, per_host: int | None = None) -> Profile:
    """Return the profile of a built schedule; by default all ranks share a host."""
    paths = ChunkPaths(
        schedule=Schedule(
            collective=schedule.collective, ranks=schedule.ranks, chunks=schedule.chunks, root=schedule.root
        ),
        paths=lambda: symmetric_traffic.paths_by_chunk(schedule),
    )
    return profile_of_paths(paths, schedule.ranks if per_host is None else per_host)


def profile_of_paths(paths: ChunkPaths, per_host: int) -> Profile:
    """Return the profile of the schedule that the paths of some chunks stand for."""
    counter = _LoadCounter(paths, per_host)
    for chunk, path in paths.paths():
        counter.add_path(chunk, path)
    return counter.profile()


def _one_shot(ranks: int, per_host: int) -> Profile:
    # All ranks do the same, and one chunk's path is the whole schedule: n (n - 1) transfers in one step.
    inside, between = per_host - 1, ranks - per_host
    load = StepLoad(inside, between, between * per_host, 1, ranks)
    loads = ((load, 1),) if ranks > 1 else ()
    return Profile("all_reduce", ranks, 1, loads, int(ranks > 1))


def _large(ranks: int) -> bool:
    return ranks > 32


def _estimated_transfers(collective: str, ranks: int) -> int:
    # Roughly a transfer for each rank and chunk in each direction.
    return 2 * ranks * ranks * (ranks.bit_length() if collective == "all_to_all" else 1)


class _LoadCounter:
    """Counts the load that paths put on each rank, or on each class of ranks that carry the same load."""

    def __init__(self, paths: ChunkPaths, per_host: int) -> None:
        self._schedule = paths.schedule
        self._class_of = paths.class_of or _own_class
        self._has_classes = paths.class_of is not None
        self._ranks, self._per_host = paths.schedule.ranks, per_host
        # If all ranks are alike by rotation, hosts cannot be told apart, and distances are counted instead.
        self._rotational = paths.rotationally_symmetric
        self._steps = self._encodings = 0
        self._encode: Counter[tuple[int, int]] = Counter()  # (step, class) -> chunks
        self._decode: Counter[tuple[int, int]] = Counter()
        # (step, class or host, whether it sends) -> chunks
        self._inside: Counter[tuple[int, int, bool]] = Counter()
        self._between: Counter[tuple[int, int, bool]] = Counter()
        self._host: Counter[tuple[int, int, bool]] = Counter()
        self._distances: Counter[tuple[int, int]] = Counter()  # (step, dst - src) -> transfers

    def add_path(self, chunk: int, path: Path) -> None:
        """Count one chunk's path."""
        # What a rank holds: the step that created it (-1: an input), and whether it is encoded already.
        current: dict[int, tuple[int, bool]] = {}
        copied_in: dict[int, int] = {}
        encodings: dict[int, int] = {}
        class_of = self._class_of
        for step, transfers in groupby(sorted(path, key=_step), key=_step):
            self._steps = max(self._steps, step + 1)
            arriving: dict[int, tuple[int, int, bool]] = {}
            for t in transfers:
                self._count_transfer(step, t.src, t.dst)
                created, encoded = current.get(t.src, (-1, False))
                if not encoded:
                    current[t.src] = (created, True)
                    # A sum is encoded when it is computed, an input when it is first sent.
                    self._encode[step if created < 0 else created, class_of(t.src)] += 1
                    encodings[t.src] = encodings.get(t.src, 0) + 1
                terms, most, _ = arriving.get(t.dst, (0, 0, False))
                arriving[t.dst] = (terms + 1, max(most, encodings[t.src]), t.op == "reduce")
            for dst, (terms, most, reduces) in arriving.items():
                self._encodings = max(self._encodings, most)
                current[dst] = (step, not reduces)
                if reduces:
                    self._decode[step, class_of(dst)] += terms + 1
                    encodings[dst] = max(encodings.get(dst, 0), most)
                    copied_in.pop(dst, None)
                else:
                    encodings[dst] = most
                    copied_in[dst] = step
        for rank, step in copied_in.items():
            if self._schedule.ends(rank, chunk):
                self._decode[step, class_of(rank)] += 1

    def profile(self) -> Profile:
        """Return the profile of all paths so far."""
        encode, decode = _largest(self._encode), _largest(self._decode)
        wire = self._by_distance() if self._rotational else self._by_rank()
        steps: Counter[StepLoad] = Counter()
        for step in range(self._steps):
            steps[StepLoad(*wire.get(step, (0, 0, 0)), encode.get(step, 0), decode.get(step, 0))] += 1
        schedule = self._schedule
        loads = tuple(sorted(steps.items()))
        return Profile(schedule.collective, schedule.ranks, schedule.chunks, loads, self._encodings)

    def _count_transfer(self, step: int, src: int, dst: int) -> None:
        if self._rotational:
            self._distances[step, (dst - src) % self._ranks] += 1
            return
        src_host, dst_host = src // self._per_host, dst // self._per_host
        if src_host != dst_host:
            self._host[step, src_host, True] += 1
            self._host[step, dst_host, False] += 1
        links = self._inside if src_host == dst_host else self._between
        links[step, self._class_of(src), True] += 1
        links[step, self._class_of(dst), False] += 1

    def _by_rank(self) -> dict[int, tuple[int, int, int]]:
        inside, between, host = map(_largest, (self._inside, self._between, self._host))
        if self._has_classes:
            host = {step: load * self._per_host for step, load in between.items()}
        return {
            step: (inside.get(step, 0), between.get(step, 0), host.get(step, 0))
            for step in range(self._steps)
        }

    def _by_distance(self) -> dict[int, tuple[int, int, int]]:
        # All ranks send over these distances. Whether a transfer leaves the host depends on the rank's place in it.
        # What a rank receives mirrors what the rank at the opposite place of its host sends.
        size, ranks = self._per_host, self._ranks
        by_step: dict[int, list[Counter[int]]] = {}
        for (step, distance), count in self._distances.items():
            inside, between = by_step.setdefault(step, [Counter(), Counter()])
            for place in range(size):
                stays = place + distance < size or place + distance >= ranks
                (inside if stays else between)[place] += count
        return {
            step: (
                max(inside.values(), default=0),
                max(between.values(), default=0),
                sum(between.values()),
            )
            for step, (inside, between) in by_step.items()
        }


def _largest(counts: Counter[Any]) -> dict[int, int]:
    """Return the largest count of any rank, class or host by step."""
    most: dict[int, int] = {}
    for (step, *_), count in counts.items():
        if count > most.get(step, 0):
            most[step] = count
    return most


def _own_class(rank: int) -> int:
    return rank


def _step(t: Transfer) -> int:
    return t.step
