"""The load that a schedule puts on ranks, links and processors, step by step: all that its time depends on.

`profile` reads the load from the schedule or, if the algorithm is symmetric, from one chunk's path, so that it works
for 100,000 ranks. Chunks count as equal: loads are in chunks, and the planner's `estimate` multiplies them by sizes.

Chunks are independent of each other, and in most algorithms chunk c takes the path of chunk 0 with every rank shifted
by c. Then the load that all chunks put on one rank is the load that chunk 0's path puts on all ranks together, and the
n - 1 transfers of one chunk describe n^2 transfers. Where nothing is symmetric there are few chunks, and their paths
are all listed. `chunk_paths` returns these paths.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

from dtcomm import algorithms
from dtcomm.algorithms import double_tree, halving, tree
from dtcomm.schedule.ir import REDUCING, Schedule, Transfer

#: Algorithms in which every chunk takes the same path, shifted, and there are as many chunks as ranks: name -> the
#: collectives of which that is true.
ROTATING = {
    "ring": ("reduce_scatter", "all_gather", "all_reduce"),
    "halving": ("reduce_scatter", "all_gather", "all_reduce"),
    "one_shot": ("reduce_scatter", "all_gather"),
    "two_shot": ("all_reduce",),
    "tree": ("reduce_scatter", "all_gather"),
}
#: Algorithms with one or two chunks, or with one or two transfers per rank, whose schedules can be built.
FEW_TRANSFERS = {
    "tree": ("all_reduce", "broadcast", "reduce"),
    "double_tree": ("all_reduce", "broadcast", "reduce"),
    "one_shot": ("broadcast", "reduce", "gather", "scatter"),
}
Path = tuple[Transfer, ...]


@dataclass(frozen=True, kw_only=True)
class ChunkPaths:
    """``schedule`` without its transfers, and the ``paths`` of some of its chunks, as (chunk, path).

    If ``class_of`` is given, the chunks that are not listed take the same paths among other ranks, so that each rank
    carries what the listed paths put on all ranks of its class. ``rotationally_symmetric``: the other ranks are those
    further on in the circle of all ranks, which does not keep hosts apart.
    """

    schedule: Schedule
    paths: Callable[[], Iterable[tuple[int, Path]]]
    class_of: Callable[[int], int] | None = None
    rotationally_symmetric: bool = False


def chunk_paths(name: str, collective: str, ranks: int, per_host: int | None = None) -> ChunkPaths | None:
    """Return the paths of ``algorithms.build(name, collective, ranks)``, or None if it has to be built to know them.

    Only hierarchical algorithms depend on the number of ranks on each host.
    """
    kind, _, levels = name.partition(":")
    if kind == "hierarchical":
        size = ranks if per_host is None else per_host
        return _hierarchical(collective, ranks, size, *algorithms.split_levels(levels))
    symmetric: dict[str, Any] = {"class_of": _one_class, "rotationally_symmetric": True}
    if collective in ROTATING.get(name, ()):
        empty = Schedule(collective=collective, ranks=ranks, chunks=ranks)
        return ChunkPaths(
            schedule=empty, paths=lambda: [(0, _path_of_chunk_0(name, collective, ranks))], **symmetric
        )
    if collective == "all_to_all":
        empty = Schedule(collective=collective, ranks=ranks, chunks=ranks**2)
        return ChunkPaths(schedule=empty, paths=lambda: _all_to_all_paths_of_rank_0(name, ranks), **symmetric)
    if collective in FEW_TRANSFERS.get(name, ()):
        whole = algorithms.build_single_level(name, collective, ranks)
        return ChunkPaths(schedule=replace(whole, transfers=()), paths=lambda: paths_by_chunk(whole))
    return None


def paths_by_chunk(schedule: Schedule) -> Iterator[tuple[int, Path]]:
    """Yield (chunk, path) for every chunk that a built schedule transfers."""
    by_chunk: dict[int, list[Transfer]] = {}
    for t in schedule.transfers:
        by_chunk.setdefault(t.chunk, []).append(t)
    for chunk, transfers in by_chunk.items():
        yield chunk, tuple(transfers)


def _one_class(rank: int) -> int:
    return 0


def _path_of_chunk_0(name: str, collective: str, ranks: int) -> Path:
    """Return the path of chunk 0 by an algorithm of `ROTATING`."""
    if collective == "all_reduce":
        half = "one_shot" if name == "two_shot" else name
        first = _path_of_chunk_0(half, "reduce_scatter", ranks)
        return first + _shift_steps(_path_of_chunk_0(half, "all_gather", ranks), _step_count(first))
    if name == "tree":
        return tuple((tree.reduce_up if collective in REDUCING else tree.copy_down)(ranks, 0, 0))
    gathers = collective == "all_gather"
    if name == "ring":
        start = 0 if gathers else 1
        hops = [(step, (start + step) % ranks, (start + step + 1) % ranks) for step in range(ranks - 1)]
    elif name == "halving":
        hops = list(_halving_hops(ranks))
        last = max((step for step, *_ in hops), default=0)
        if gathers:
            hops = [(last - step, dst, src) for step, src, dst in hops]
    else:
        hops = [(0, 0, peer) if gathers else (0, peer, 0) for peer in range(1, ranks)]
    return tuple(Transfer(step, src, dst, 0, "copy" if gathers else "reduce") for step, src, dst in hops)


def _halving_hops(ranks: int) -> Iterator[tuple[int, int, int]]:
    for step, (near, far) in enumerate(halving.distances(ranks)):
        for distance in range(near, far):
            yield step, -distance % ranks, (near - distance) % ranks


def _all_to_all_paths_of_rank_0(name: str, ranks: int) -> Iterator[tuple[int, Path]]:
    # Every other rank sends the same as rank 0, shifted by its number.
    for dst in range(1, ranks):
        if name == "tree":
            yield dst, tuple(tree.path_down(ranks, 0, dst, dst))
        else:
            yield dst, (Transfer(0, 0, dst, dst, "copy"),)


def _hierarchical(collective: str, ranks: int, size: int, inside: str, between: str) -> ChunkPaths | None:
    hosts = ranks // size
    if size * hosts != ranks:
        raise ValueError(f"per_host: {size} does not divide {ranks} ranks")
    if collective == "all_reduce":
        return _hierarchical_all_reduce(size, hosts, inside, between)
    if collective not in ("reduce_scatter", "all_gather"):
        return None
    if collective not in ROTATING.get(inside, ()) or collective not in ROTATING.get(between, ()):
        return None

    def paths() -> list[tuple[int, Path]]:
        within = _on_all_hosts(_path_of_chunk_0(inside, collective, size), size, hosts)
        across = _move(_path_of_chunk_0(between, collective, hosts), 0, size, 1)
        first, then = (within, across) if collective == "reduce_scatter" else (across, within)
        return [(0, first + _shift_steps(then, _step_count(first)))]

    empty = Schedule(collective=collective, ranks=ranks, chunks=ranks)
    return ChunkPaths(schedule=empty, paths=paths, class_of=_one_class)


def _hierarchical_all_reduce(size: int, hosts: int, inside: str, between: str) -> ChunkPaths | None:
    # Rank 0 of every host represents the share whose path is listed; the other shares rotate inside the hosts.
    if "reduce_scatter" not in ROTATING.get(inside, ()):
        return None
    if "all_reduce" in ROTATING.get(between, ()):
        chunks = hosts
        paths_between = {0: _path_of_chunk_0(between, "all_reduce", hosts)}
        class_of = _one_class
    elif between in ("tree", "double_tree"):
        top = (tree if between == "tree" else double_tree).all_reduce(hosts)
        chunks, paths_between, class_of = top.chunks, dict(paths_by_chunk(top)), lambda rank: rank // size
        for chunk in range(chunks):
            paths_between.setdefault(chunk, ())
    else:
        return None

    def paths() -> Iterator[tuple[int, Path]]:
        scatter = _on_all_hosts(_path_of_chunk_0(inside, "reduce_scatter", size), size, hosts)
        gather = _on_all_hosts(_path_of_chunk_0(inside, "all_gather", size), size, hosts)
        start_between = _step_count(scatter)
        start_gather = start_between + max(map(_step_count, paths_between.values()))
        for chunk, across in paths_between.items():
            moved = _shift_steps(_move(across, 0, size, 1), start_between)
            yield chunk, (*scatter, *moved, *_shift_steps(gather, start_gather))

    empty = Schedule(collective="all_reduce", ranks=size * hosts, chunks=size * chunks)
    return ChunkPaths(schedule=empty, paths=paths, class_of=class_of)


def _on_all_hosts(path: Path, size: int, hosts: int) -> Path:
    return tuple(chain(*(_move(path, host * size, 1) for host in range(hosts))))


def _move(path: Iterable[Transfer], first: int, stride: int, level: int = 0) -> Path:
    """Return the same path among the ranks first, first + stride, …"""
    return tuple(
        Transfer(t.step, first + t.src * stride, first + t.dst * stride, t.chunk, t.op, level) for t in path
    )


def _shift_steps(path: Iterable[Transfer], steps: int) -> Path:
    return tuple(Transfer(t.step + steps, t.src, t.dst, t.chunk, t.op, t.level) for t in path)


def _step_count(path: Iterable[Transfer]) -> int:
    return max((t.step + 1 for t in path), default=0)


#: Schedules of up to about this many transfers are built and read; larger ones need symmetry.
MAX_TRANSFERS = 20_000
MANY_RANKS = 32  # from here on symmetry is used where it is known


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
    paths = chunk_paths(name, collective, ranks, per_host) if ranks > MANY_RANKS else None
    if paths is not None:
        return profile_of_paths(paths, per_host)
    # Roughly a transfer for each rank and chunk in each direction.
    if 2 * ranks * ranks * (ranks.bit_length() if collective == "all_to_all" else 1) > MAX_TRANSFERS:
        return None
    hosts = (per_host,) * (ranks // per_host)
    return profile_of_schedule(algorithms.build(name, collective, ranks, hosts=hosts), per_host)


def profile_of_schedule(schedule: Schedule, per_host: int | None = None) -> Profile:
    """Return the profile of a built schedule; by default all ranks share a host."""
    paths = ChunkPaths(
        schedule=Schedule(
            collective=schedule.collective, ranks=schedule.ranks, chunks=schedule.chunks, root=schedule.root
        ),
        paths=lambda: paths_by_chunk(schedule),
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


class _LoadCounter:
    """Counts the load that paths put on each rank, or on each class of ranks that carry the same load."""

    def __init__(self, paths: ChunkPaths, per_host: int) -> None:
        self._schedule = paths.schedule
        self._class_of = paths.class_of or (lambda rank: rank)
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
        for step, transfers in groupby(sorted(path, key=attrgetter("step")), key=attrgetter("step")):
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
            step: (max(inside.values(), default=0), max(between.values(), default=0), sum(between.values()))
            for step, (inside, between) in by_step.items()
        }


def _largest(counts: Counter[Any]) -> dict[int, int]:
    """Return the largest count of any rank, class or host by step."""
    most: dict[int, int] = {}
    for (step, *_), count in counts.items():
        most[step] = max(count, most.get(step, 0))
    return most
