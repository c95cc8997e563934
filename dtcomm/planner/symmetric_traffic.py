"""Traffic of schedules with many ranks, without building them: one chunk's path, and the ranks that it stands for.

Chunks are independent of each other, and in most algorithms chunk c takes the path of chunk 0 with every rank shifted
by c. Then the load that all chunks put on one rank is the load that chunk 0's path puts on all ranks together, and the
n - 1 transfers of one chunk describe n^2 transfers. Where nothing is symmetric there are few chunks, and their paths
are all listed. `traffic_profile` reads these paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from dtcomm.algorithms import double_tree, halving, registry, tree
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

    Args:
        name: The algorithm's name.
        collective: The collective's name.
        ranks: The number of ranks.
        per_host: For hierarchical: the number of ranks on each host, in order.
    """
    kind, _, levels = name.partition(":")
    if kind == "hierarchical":
        size = ranks if per_host is None else per_host
        return _hierarchical(collective, ranks, size, *registry.split_levels(levels))
    if collective in ROTATING.get(name, ()):
        empty = Schedule(collective=collective, ranks=ranks, chunks=ranks)
        return ChunkPaths(
            schedule=empty,
            paths=lambda: [(0, _path_of_chunk_0(name, collective, ranks))],
            class_of=_one_class,
            rotationally_symmetric=True,
        )
    if collective == "all_to_all":
        empty = Schedule(collective=collective, ranks=ranks, chunks=ranks**2)
        return ChunkPaths(
            schedule=empty,
            paths=lambda: _all_to_all_paths_of_rank_0(name, ranks),
            class_of=_one_class,
            rotationally_symmetric=True,
        )
    if collective in FEW_TRANSFERS.get(name, ()):
        whole = registry.build_single_level(name, collective, ranks)
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
        return first + _shift_steps(_path_of_chunk_0(half, "all_gather", ranks), _steps(first))
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
        within = _path_of_chunk_0(inside, collective, size)
        across = _path_of_chunk_0(between, collective, hosts)
        on_all_hosts = [_move(within, host * size, 1) for host in range(hosts)]
        if collective == "reduce_scatter":
            return [(0, (*chain(*on_all_hosts), *_shift_steps(_move(across, 0, size, 1), _steps(within))))]
        return [(0, (*_move(across, 0, size, 1), *_shift_steps(chain(*on_all_hosts), _steps(across))))]

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
        scatter = _path_of_chunk_0(inside, "reduce_scatter", size)
        gather = _path_of_chunk_0(inside, "all_gather", size)
        start_between = _steps(scatter)
        start_gather = start_between + max(map(_steps, paths_between.values()))
        for chunk, across in paths_between.items():
            scatters = chain(*(_move(scatter, host * size, 1) for host in range(hosts)))
            gathers = chain(*(_move(gather, host * size, 1) for host in range(hosts)))
            yield (
                chunk,
                (
                    *scatters,
                    *_shift_steps(_move(across, 0, size, 1), start_between),
                    *_shift_steps(gathers, start_gather),
                ),
            )

    empty = Schedule(collective="all_reduce", ranks=size * hosts, chunks=size * chunks)
    return ChunkPaths(schedule=empty, paths=paths, class_of=class_of)


def _move(path: Iterable[Transfer], first: int, stride: int, level: int = 0) -> Path:
    """Return the same path among the ranks first, first + stride, …"""
    return tuple(
        Transfer(t.step, first + t.src * stride, first + t.dst * stride, t.chunk, t.op, level) for t in path
    )


def _shift_steps(path: Iterable[Transfer], steps: int) -> Path:
    return tuple(Transfer(t.step + steps, t.src, t.dst, t.chunk, t.op, t.level) for t in path)


def _steps(path: Iterable[Transfer]) -> int:
    return max((t.step + 1 for t in path), default=0)
