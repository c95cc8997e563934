"""The one list of algorithms: what a name makes.

A name is one of ``flat.ALGORITHMS``, or ``hierarchical``, or ``hierarchical:INSIDE/BETWEEN`` with names of those:
``hierarchical:ring/tree`` runs rings inside the hosts and a tree between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from dtcomm.algorithms import flat, hierarchical
from dtcomm.algorithms.hierarchical import Hosts
from dtcomm.schedule.ir import COLLECTIVES, ROOTED, Schedule

HIERARCHICAL: dict[str, Callable[..., Schedule]] = {
    "all_reduce": hierarchical.all_reduce,
    "reduce_scatter": hierarchical.reduce_scatter,
    "all_gather": hierarchical.all_gather,
    "broadcast": hierarchical.broadcast,
    "reduce": hierarchical.reduce,
}


def collectives() -> tuple[str, ...]:
    """The collectives that some algorithm can do."""
    return tuple(name for name in COLLECTIVES if flat.available(name))


def available(collective: str) -> tuple[str, ...]:
    """The names that ``build`` takes for ``collective``, ``hierarchical`` without its levels' algorithms."""
    names = flat.available(collective)
    if not names:
        raise ValueError(f"collective: {collective!r} is not one of {', '.join(collectives())}")
    return (*names, "hierarchical") if collective in HIERARCHICAL else names


def require(name: str, collective: str, besides: tuple[str, ...] = ()) -> None:
    """ValueError that lists what is valid, where ``collective`` has no algorithm ``name`` (nor is it one of
    ``besides``).
    """
    names = (*besides, *available(collective))
    kind, colon, levels = name.partition(":")
    if kind not in names or (colon and kind != "hierarchical"):
        raise ValueError(f"algorithm: {name!r} is not one of {', '.join(names)}, which {collective} has")
    if colon:
        _levels(name, collective, levels)


def _levels(name: str, collective: str, levels: str) -> tuple[str, str]:
    inside, _, between = levels.partition("/")
    inside, between = inside or hierarchical.INSIDE, between or hierarchical.BETWEEN
    # Inside a host an all-reduce is a reduce-scatter and, later, an all-gather. Between hosts its one shot would
    # leave the deputies with sums that each encodes for its own host: equal numbers, but not the same bits.
    below = "reduce_scatter" if collective == "all_reduce" else collective
    above = [each for each in flat.available(collective) if (each, collective) != ("one_shot", "all_reduce")]
    for part, valid in ((inside, flat.available(below)), (between, above)):
        if part not in valid:
            raise ValueError(
                f"algorithm: {part!r} in {name!r} is not one of {', '.join(valid)}; "
                "expected hierarchical:INSIDE/BETWEEN, like hierarchical:ring/tree"
            )
    return inside, between


@functools.lru_cache(maxsize=256)
def build(
    name: str,
    collective: str,
    ranks: int,
    root: int = 0,
    chunks: int | None = None,
    hosts: Hosts | None = None,
) -> Schedule:
    """The schedule of ``collective`` over ``ranks`` ranks by algorithm ``name``.

    ``root`` is for the rooted collectives; ``chunks`` (default: what suits the algorithm) for those that leave a
    choice; ``hosts`` for hierarchical: the hosts' sizes, or the ranks on each (default: all on one).
    Raises ValueError naming the argument and what is valid.
    """
    require(name, collective)
    if ranks < 1:
        raise ValueError(f"ranks: must be at least 1, got {ranks}")
    if collective in ROOTED:
        if not 0 <= root < ranks:
            raise ValueError(f"root: {root} is not a rank of 0..{ranks - 1}")
    elif root:
        raise ValueError(f"root: {collective} has none, got {root}")
    kind, _, levels = name.partition(":")
    if kind != "hierarchical":
        return flat.build(name, collective, ranks, root, chunks)
    if chunks is not None:
        raise ValueError(f"chunks: hierarchical makes as many as its levels need, got chunks={chunks}")
    groups = hierarchical.members((ranks,) if hosts is None else hosts)
    if sum(map(len, groups)) != ranks:
        raise ValueError(f"hosts: {hosts!r} have {sum(map(len, groups))} ranks, expected {ranks}")
    inside, between = _levels(name, collective, levels)
    rooted = (root,) if collective in ROOTED else ()
    return HIERARCHICAL[collective](groups, *rooted, inside=inside, between=between)
