"""Schedules for many ranks without writing them out: one chunk's way, and the ranks that it stands for.

Chunks do not know of each other, and in most algorithms chunk c goes the way of chunk 0 with everybody c ranks
further. Then what all chunks put on one rank is what chunk 0's way puts on all ranks together, and n^2 transfers are
told by the n - 1 of one chunk. Where nothing is symmetric there are few chunks, whose ways are all told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from dtcomm.algorithms import double_tree, flat, halving, hierarchical, tree
from dtcomm.schedule.ir import REDUCING, Schedule, Transfer

#: Algorithms of which every chunk goes the same way, as many chunks as ranks: name → of which collectives.
ROTATING = {
    "ring": ("reduce_scatter", "all_gather", "all_reduce"),
    "halving": ("reduce_scatter", "all_gather", "all_reduce"),
    "one_shot": ("reduce_scatter", "all_gather"),
    "two_shot": ("all_reduce",),
    "tree": ("reduce_scatter", "all_gather"),
}
#: Those with one or two chunks, or a transfer or two a rank: they can be written out.
FEW = {
    "tree": ("all_reduce", "broadcast", "reduce"),
    "double_tree": ("all_reduce", "broadcast", "reduce"),
    "one_shot": ("broadcast", "reduce", "gather", "scatter"),
}
Way = tuple[Transfer, ...]


@dataclass(frozen=True, kw_only=True)
class Ways:
    """``schedule`` without its transfers, and the ``ways`` of some of its chunks.

    Where ``class_of`` is given, the chunks that are not told go the same ways among other ranks, so that each rank
    carries what the told ways put on its whole class. ``turns``: the others are those further on in the circle of
    all ranks, which does not keep hosts apart.
    """

    schedule: Schedule
    ways: Callable[[], Iterable[tuple[int, Way]]]
    class_of: Callable[[int], int] | None = None
    turns: bool = False


def ways(name: str, collective: str, ranks: int, per_host: int | None = None) -> Ways | None:
    """The ways of ``algorithms.build(name, collective, ranks)``, None where they have to be enumerated.

    ``per_host`` is for hierarchical: that many ranks on each host, in order.
    """
    kind, _, levels = name.partition(":")
    if kind == "hierarchical":
        inside, _, between = levels.partition("/")
        size = ranks if per_host is None else per_host
        return _hierarchical(
            collective, ranks, size, inside or hierarchical.INSIDE, between or hierarchical.BETWEEN
        )
    if collective in ROTATING.get(name, ()):
        empty = Schedule(collective=collective, ranks=ranks, chunks=ranks)
        return Ways(
            schedule=empty, ways=lambda: [(0, _way(name, collective, ranks))], class_of=_all, turns=True
        )
    if collective == "all_to_all":
        empty = Schedule(collective=collective, ranks=ranks, chunks=ranks**2)
        return Ways(schedule=empty, ways=lambda: _exchange(name, ranks), class_of=_all, turns=True)
    if collective in FEW.get(name, ()):
        whole = flat.build(name, collective, ranks)
        return Ways(schedule=replace(whole, transfers=()), ways=lambda: _by_chunk(whole))
    return None


def _all(rank: int) -> int:
    return 0


def _way(name: str, collective: str, ranks: int) -> Way:
    # Of chunk 0, by an algorithm that rotates.
    if collective == "all_reduce":
        half = "one_shot" if name == "two_shot" else name
        first = _way(half, "reduce_scatter", ranks)
        return first + _later(_way(half, "all_gather", ranks), _steps(first))
    if name == "tree":
        return tuple((tree._up if collective in REDUCING else tree._down)(ranks, 0, 0))
    gathers = collective == "all_gather"
    if name == "ring":
        start = 0 if gathers else 1
        hops = [(step, (start + step) % ranks, (start + step + 1) % ranks) for step in range(ranks - 1)]
    elif name == "halving":
        hops = list(_halving(ranks))
        last = max((step for step, *_ in hops), default=0)
        if gathers:
            hops = [(last - step, dst, src) for step, src, dst in hops]
    else:
        hops = [(0, 0, peer) if gathers else (0, peer, 0) for peer in range(1, ranks)]
    return tuple(Transfer(step, src, dst, 0, "copy" if gathers else "reduce") for step, src, dst in hops)


def _halving(ranks: int) -> Iterator[tuple[int, int, int]]:
    for step, (near, far) in enumerate(halving.distances(ranks)):
        for distance in range(near, far):
            yield step, -distance % ranks, (near - distance) % ranks


def _exchange(name: str, ranks: int) -> Iterator[tuple[int, Way]]:
    # What rank 0 sends; every other rank sends the same, as many ranks further.
    for dst in range(1, ranks):
        if name == "tree":
            yield dst, tuple(tree._path(ranks, 0, dst, dst))
        else:
            yield dst, (Transfer(0, 0, dst, dst, "copy"),)


def _by_chunk(schedule: Schedule) -> Iterator[tuple[int, Way]]:
    by_chunk: dict[int, list[Transfer]] = {}
    for t in schedule.transfers:
        by_chunk.setdefault(t.chunk, []).append(t)
    for chunk, transfers in by_chunk.items():
        yield chunk, tuple(transfers)


def _hierarchical(collective: str, ranks: int, size: int, inside: str, between: str) -> Ways | None:
    hosts = ranks // size
    if size * hosts != ranks:
        raise ValueError(f"per_host: {size} does not divide {ranks} ranks")
    if collective == "all_reduce":
        return _hierarchical_all_reduce(size, hosts, inside, between)
    if collective not in ("reduce_scatter", "all_gather"):
        return None
    if collective not in ROTATING.get(inside, ()) or collective not in ROTATING.get(between, ()):
        return None

    def way() -> list[tuple[int, Way]]:
        within = _way(inside, collective, size)
        across = _way(between, collective, hosts)
        if collective == "reduce_scatter":
            everywhere = [_move(within, host * size, 1) for host in range(hosts)]
            return [(0, (*chain(*everywhere), *_later(_move(across, 0, size, 1), _steps(within))))]
        everywhere = [_move(within, host * size, 1) for host in range(hosts)]
        return [(0, (*_move(across, 0, size, 1), *_later(chain(*everywhere), _steps(across))))]

    empty = Schedule(collective=collective, ranks=ranks, chunks=ranks)
    return Ways(schedule=empty, ways=way, class_of=_all)


def _hierarchical_all_reduce(size: int, hosts: int, inside: str, between: str) -> Ways | None:
    # Every host's rank 0 is the deputy of the share that is told; the other shares rotate inside the hosts.
    if "reduce_scatter" not in ROTATING.get(inside, ()):
        return None
    if "all_reduce" in ROTATING.get(between, ()):
        chunks, tops, class_of = hosts, {0: _way(between, "all_reduce", hosts)}, _all
    elif between in ("tree", "double_tree"):
        top = (tree if between == "tree" else double_tree).all_reduce(hosts)
        chunks, tops, class_of = top.chunks, dict(_by_chunk(top)), lambda rank: rank // size
        for chunk in range(chunks):
            tops.setdefault(chunk, ())
    else:
        return None

    def way() -> Iterator[tuple[int, Way]]:
        down, up = _way(inside, "reduce_scatter", size), _way(inside, "all_gather", size)
        first = _steps(down)
        then = first + max(map(_steps, tops.values()))
        for chunk, across in tops.items():
            within = chain(*(_move(down, host * size, 1) for host in range(hosts)))
            after = chain(*(_move(up, host * size, 1) for host in range(hosts)))
            yield chunk, (*within, *_later(_move(across, 0, size, 1), first), *_later(after, then))

    empty = Schedule(collective="all_reduce", ranks=size * hosts, chunks=size * chunks)
    return Ways(schedule=empty, ways=way, class_of=class_of)


def _move(way: Iterable[Transfer], first: int, stride: int, level: int = 0) -> Way:
    # The same way among the ranks first, first + stride, …
    return tuple(
        Transfer(t.step, first + t.src * stride, first + t.dst * stride, t.chunk, t.op, level) for t in way
    )


def _later(way: Iterable[Transfer], by: int) -> Way:
    return tuple(Transfer(t.step + by, t.src, t.dst, t.chunk, t.op, t.level) for t in way)


def _steps(way: Iterable[Transfer]) -> int:
    return max((t.step + 1 for t in way), default=0)
