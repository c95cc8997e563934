"""Levels: inside the hosts (level 0), between them (level 1), inside again.

Each chunk has a deputy on every host. Inside a host the deputies collect its ranks' contributions, between the hosts
they settle their chunks among themselves, and then they hand the results round. So all ranks of a host take part in
the traffic between hosts, each with its share, and what crosses the slow level does so once for the whole host.
Any algorithm may serve on either level, since chunks do not know of each other.

``hosts`` are their sizes, in the order of the ranks, or the ranks of each; sizes may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dtcomm.algorithms import flat
from dtcomm.algorithms.compose import embed
from dtcomm.schedule.ir import Schedule, Transfer

Hosts = tuple[int, ...] | tuple[tuple[int, ...], ...]
INSIDE, BETWEEN = "one_shot", "halving"


def all_reduce(hosts: Hosts, inside: str = INSIDE, between: str = BETWEEN) -> Schedule:
    """Reduce-scatter inside, all-reduce of the shares between, all-gather inside.

    A host with fewer ranks than the largest has deputies with more than one share.
    """
    groups = members(hosts)
    top = flat.build(between, "all_reduce", len(groups))
    shares = max(map(len, groups))
    deputies = [[share * len(group) // shares for share in range(shares)] for group in groups]
    chunks = [_inverse([at[chunk // top.chunks] for chunk in range(shares * top.chunks)]) for at in deputies]
    steps = _Steps()
    for group, of in zip(groups, chunks, strict=True):
        steps.add(flat.build(inside, "reduce_scatter", len(group)), group, of)
    steps.next()
    for share in range(shares):
        ranks = [group[at[share]] for group, at in zip(groups, deputies, strict=True)]
        steps.add(top, ranks, {j: [share * top.chunks + j] for j in range(top.chunks)}, level=1)
    steps.next()
    for group, of in zip(groups, chunks, strict=True):
        steps.add(flat.build(inside, "all_gather", len(group)), group, of)
    return steps.schedule("all_reduce", groups, shares * top.chunks)


def reduce_scatter(hosts: Hosts, inside: str = INSIDE, between: str = BETWEEN) -> Schedule:
    """Inside each host the deputies of a shard add up, then they reduce it to its owner."""
    steps, groups = _Steps(), members(hosts)
    _inside(steps, groups, "reduce_scatter", inside)
    steps.next()
    _between(steps, groups, "reduce_scatter", between)
    return steps.schedule("reduce_scatter", groups, sum(map(len, groups)))


def all_gather(hosts: Hosts, inside: str = INSIDE, between: str = BETWEEN) -> Schedule:
    """A shard goes to its deputy on each host, which hands it round: it enters a host once."""
    steps, groups = _Steps(), members(hosts)
    _between(steps, groups, "all_gather", between)
    steps.next()
    _inside(steps, groups, "all_gather", inside)
    return steps.schedule("all_gather", groups, sum(map(len, groups)))


def broadcast(hosts: Hosts, root: int = 0, inside: str = INSIDE, between: str = BETWEEN) -> Schedule:
    """From the root to one rank of each host, and from these to the others of theirs."""
    return _rooted("broadcast", hosts, root, inside, between)


def reduce(hosts: Hosts, root: int = 0, inside: str = INSIDE, between: str = BETWEEN) -> Schedule:
    """Inside each host to one rank, and from these to the root."""
    return _rooted("reduce", hosts, root, inside, between)


def members(hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host. ValueError where sizes are not positive or ranks are not 0 … n - 1, each once."""
    groups: list[tuple[int, ...]] = []
    for host in hosts:
        start = sum(map(len, groups))
        groups.append(tuple(range(start, start + host)) if isinstance(host, int) else tuple(host))
    ranks = sorted(rank for group in groups for rank in group)
    if not groups or not all(groups) or ranks != list(range(len(ranks))):
        raise ValueError(f"hosts: expected sizes of at least 1, or every rank on one host, got {hosts!r}")
    return tuple(groups)


class _Steps:
    """Transfers, phase after phase; a phase begins when the longest part of the one before has ended."""

    def __init__(self) -> None:
        self._transfers: list[Transfer] = []
        self._first = 0

    def add(
        self, part: Schedule, ranks: Sequence[int], chunks: Mapping[int, Sequence[int]], level: int = 0
    ) -> None:
        self._transfers += embed(part, ranks, chunks, self._first, level)

    def next(self) -> None:
        self._first = max((t.step + 1 for t in self._transfers), default=0)

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


def _inverse(values: Sequence[int]) -> dict[int, list[int]]:
    places = defaultdict(list)
    for place, value in enumerate(values):
        places[value].append(place)
    return places


def _homes(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(host, place in it) of each rank."""
    found = {rank: (host, at) for host, group in enumerate(groups) for at, rank in enumerate(group)}
    return [found[rank] for rank in range(len(found))]


def _deputies(groups: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Who stands for ``rank``'s shard on each host, as places: at the same relative place, on its own host itself."""
    host, at = _homes(groups)[rank]
    return [at * len(group) // len(groups[host]) for group in groups]


def _inside(steps: _Steps, groups: Sequence[Sequence[int]], collective: str, algorithm: str) -> None:
    deputies = [_deputies(groups, rank) for rank in range(sum(map(len, groups)))]
    for host, group in enumerate(groups):
        shards = _inverse([at[host] for at in deputies])
        steps.add(flat.build(algorithm, collective, len(group)), group, shards)


def _between(steps: _Steps, groups: Sequence[Sequence[int]], collective: str, algorithm: str) -> None:
    top = flat.build(algorithm, collective, len(groups))
    for rank, (host, _) in enumerate(_homes(groups)):
        deputies = _deputies(groups, rank)
        ranks = [group[at] for group, at in zip(groups, deputies, strict=True)]
        steps.add(top, ranks, {host: [rank]}, level=1)


def _rooted(collective: str, hosts: Hosts, root: int, inside: str, between: str) -> Schedule:
    groups = members(hosts)
    home, _ = _homes(groups)[root]
    heads = [root if host == home else group[0] for host, group in enumerate(groups)]
    top = flat.build(between, collective, len(groups), root=home)
    parts = [
        flat.build(inside, collective, len(group), root=group.index(head))
        for group, head in zip(groups, heads, strict=True)
    ]
    chunks = max(top.chunks, *(part.chunks for part in parts))

    def spread(part: Schedule) -> dict[int, list[int]]:
        return _inverse([chunk * part.chunks // chunks for chunk in range(chunks)])

    steps = _Steps()
    for level in (1, 0) if collective == "broadcast" else (0, 1):
        if level:
            steps.add(top, heads, spread(top), level=1)
        else:
            for part, group in zip(parts, groups, strict=True):
                steps.add(part, group, spread(part))
        steps.next()
    return steps.schedule(collective, groups, chunks, root)
