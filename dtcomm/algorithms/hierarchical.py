"""Hierarchical algorithms: inside the hosts (level 0), between them (level 1), inside again.

Each chunk has a representative rank on every host. Inside a host the representatives collect the contributions of its
ranks, between the hosts they run the collective on their chunks, and then they distribute the results inside their
host. So all ranks of a host take part in the traffic between hosts, each with its share, and a chunk crosses the slow
level once for the whole host. Any algorithm may serve on either level, since chunks are independent of each other.

``hosts`` are the hosts' sizes, in the order of the ranks, or the ranks on each host; sizes may differ. ``inside`` and
``between`` build the schedules of the two levels; `dtcomm.algorithms` passes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from dtcomm.schedule.builder import remap
from dtcomm.schedule.ir import Schedule, Transfer

Hosts = tuple[int, ...] | tuple[tuple[int, ...], ...]


class LevelBuilder(Protocol):
    """Builds the schedule of one level by a fixed algorithm."""

    def __call__(self, collective: str, ranks: int, root: int = 0) -> Schedule: ...


def all_reduce(hosts: Hosts, inside: LevelBuilder, between: LevelBuilder) -> Schedule:
    """Reduce-scatter inside the hosts, all-reduce of the shares between them, all-gather inside.

    On a host with fewer ranks than the largest host, a rank represents more than one share.
    """
    groups = ranks_by_host(hosts)
    top = between("all_reduce", len(groups))
    shares = max(map(len, groups))
    representatives = [[share * len(group) // shares for share in range(shares)] for group in groups]
    chunks = [
        _indices_by_value([places[chunk // top.chunks] for chunk in range(shares * top.chunks)])
        for places in representatives
    ]
    builder = _PhaseBuilder()
    for group, group_chunks in zip(groups, chunks, strict=True):
        builder.add(inside("reduce_scatter", len(group)), group, group_chunks)
    builder.next_phase()
    for share in range(shares):
        ranks = [group[places[share]] for group, places in zip(groups, representatives, strict=True)]
        builder.add(top, ranks, {j: [share * top.chunks + j] for j in range(top.chunks)}, level=1)
    builder.next_phase()
    for group, group_chunks in zip(groups, chunks, strict=True):
        builder.add(inside("all_gather", len(group)), group, group_chunks)
    return builder.schedule("all_reduce", groups, shares * top.chunks)


def reduce_scatter(hosts: Hosts, inside: LevelBuilder, between: LevelBuilder) -> Schedule:
    """Inside each host a shard is summed at its representative, then the representatives reduce it to its owner."""
    builder, groups = _PhaseBuilder(), ranks_by_host(hosts)
    _add_inside(builder, groups, "reduce_scatter", inside)
    builder.next_phase()
    _add_between(builder, groups, "reduce_scatter", between)
    return builder.schedule("reduce_scatter", groups, sum(map(len, groups)))


def all_gather(hosts: Hosts, inside: LevelBuilder, between: LevelBuilder) -> Schedule:
    """A shard goes to its representative on each host, which distributes it: a shard enters a host once."""
    builder, groups = _PhaseBuilder(), ranks_by_host(hosts)
    _add_between(builder, groups, "all_gather", between)
    builder.next_phase()
    _add_inside(builder, groups, "all_gather", inside)
    return builder.schedule("all_gather", groups, sum(map(len, groups)))


def broadcast(hosts: Hosts, root: int, inside: LevelBuilder, between: LevelBuilder) -> Schedule:
    """From the root to one rank of each host, and from these to the other ranks of their hosts."""
    return _rooted("broadcast", hosts, root, inside, between)


def reduce(hosts: Hosts, root: int, inside: LevelBuilder, between: LevelBuilder) -> Schedule:
    """Inside each host to one rank, and from these to the root."""
    return _rooted("reduce", hosts, root, inside, between)


def ranks_by_host(hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host; ValueError if sizes are not positive, or ranks not 0 … n - 1, each once."""
    groups: list[tuple[int, ...]] = []
    for host in hosts:
        start = sum(map(len, groups))
        groups.append(tuple(range(start, start + host)) if isinstance(host, int) else tuple(host))
    ranks = sorted(rank for group in groups for rank in group)
    if not groups or not all(groups) or ranks != list(range(len(ranks))):
        raise ValueError(f"hosts: expected sizes of at least 1, or every rank on one host, got {hosts!r}")
    return tuple(groups)


class _PhaseBuilder:
    """Collects the transfers of parts that run at the same time (a phase), phase after phase."""

    def __init__(self) -> None:
        self._transfers: list[Transfer] = []
        self._first_step = 0

    def add(
        self, part: Schedule, ranks: Sequence[int], chunks: Mapping[int, Sequence[int]], level: int = 0
    ) -> None:
        """Add a part to the current phase; the arguments are those of `remap`."""
        self._transfers += remap(part, ranks, chunks, self._first_step, level)

    def next_phase(self) -> None:
        """Start a phase after the last step so far."""
        self._first_step = max((t.step + 1 for t in self._transfers), default=0)

    def schedule(
        self, collective: str, groups: Sequence[Sequence[int]], chunks: int, root: int = 0
    ) -> Schedule:
        return Schedule(
            collective=collective,
            ranks=sum(map(len, groups)),
            chunks=chunks,
            root=root,
            transfers=tuple(self._transfers),
        )


def _indices_by_value(values: Sequence[int]) -> dict[int, list[int]]:
    indices = defaultdict(list)
    for index, value in enumerate(values):
        indices[value].append(index)
    return indices


def _places(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return (host, place in it) of each rank."""
    places = {rank: (host, at) for host, group in enumerate(groups) for at, rank in enumerate(group)}
    return [places[rank] for rank in range(len(places))]


def _representatives(groups: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Return which place of each host represents ``rank``'s shard: the same relative place, or the rank's own."""
    host, at = _places(groups)[rank]
    return [at * len(group) // len(groups[host]) for group in groups]


def _add_inside(
    builder: _PhaseBuilder, groups: Sequence[Sequence[int]], collective: str, inside: LevelBuilder
) -> None:
    representatives = [_representatives(groups, rank) for rank in range(sum(map(len, groups)))]
    for host, group in enumerate(groups):
        shards = _indices_by_value([places[host] for places in representatives])
        builder.add(inside(collective, len(group)), group, shards)


def _add_between(
    builder: _PhaseBuilder, groups: Sequence[Sequence[int]], collective: str, between: LevelBuilder
) -> None:
    top = between(collective, len(groups))
    for rank, (host, _) in enumerate(_places(groups)):
        representatives = _representatives(groups, rank)
        ranks = [group[at] for group, at in zip(groups, representatives, strict=True)]
        builder.add(top, ranks, {host: [rank]}, level=1)


def _rooted(
    collective: str, hosts: Hosts, root: int, inside: LevelBuilder, between: LevelBuilder
) -> Schedule:
    groups = ranks_by_host(hosts)
    root_host, _ = _places(groups)[root]
    heads = [root if host == root_host else group[0] for host, group in enumerate(groups)]
    top = between(collective, len(groups), root=root_host)
    parts = [
        inside(collective, len(group), root=group.index(head))
        for group, head in zip(groups, heads, strict=True)
    ]
    chunks = max(top.chunks, *(part.chunks for part in parts))

    def spread(part: Schedule) -> dict[int, list[int]]:
        return _indices_by_value([chunk * part.chunks // chunks for chunk in range(chunks)])

    builder = _PhaseBuilder()
    for level in (1, 0) if collective == "broadcast" else (0, 1):
        if level:
            builder.add(top, heads, spread(top), level=1)
        else:
            for part, group in zip(parts, groups, strict=True):
                builder.add(part, group, spread(part))
        builder.next_phase()
    return builder.schedule(collective, groups, chunks, root)
