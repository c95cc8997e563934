"""Algorithms: pure functions from a number of ranks to a schedule, and the registry of their names.

A module here is an algorithm, or a family of them. `build` makes the schedule of a collective by an algorithm's name,
`available` lists the names, and `register` adds one of your own.

A name is one of `SINGLE_LEVEL`, or ``hierarchical``, or ``hierarchical:INSIDE/BETWEEN`` with names of those:
``hierarchical:ring/tree`` runs rings inside the hosts and a tree between them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dtcomm.algorithms import direct, double_tree, halving, hierarchical, ring, tree
from dtcomm.algorithms.hierarchical import Hosts
from dtcomm.arguments import suggest
from dtcomm.errors import ScheduleError
from dtcomm.schedule.ir import COLLECTIVES, ROOTED, Schedule
from dtcomm.schedule.verify import verify

__all__ = ["available", "build", "register"]

Builders = dict[str, Callable[..., Schedule]]  # by collective


def _builders(module: ModuleType) -> Builders:
    """Return the functions of a module that have the name of a collective."""
    return {name: getattr(module, name) for name in COLLECTIVES if hasattr(module, name)}


# Functions of ranks, and of root and chunks if they take them. The order is that of error messages.
SINGLE_LEVEL: dict[str, Builders] = {
    "ring": _builders(ring),
    "tree": _builders(tree),
    "double_tree": _builders(double_tree),
    "halving": _builders(halving),
    "one_shot": _builders(direct) | {"all_reduce": direct.one_shot},
    "two_shot": {
        "all_reduce": direct.two_shot,
        "broadcast": direct.broadcast_two_shot,
        "reduce": direct.reduce_two_shot,
    },
}
HIERARCHICAL: Builders = _builders(hierarchical)
# The algorithms of ``hierarchical`` without a suffix.
DEFAULT_INSIDE, DEFAULT_BETWEEN = "one_shot", "halving"
# The algorithms that `register` added, in the form of `SINGLE_LEVEL`.
REGISTERED: dict[str, Builders] = {}
# What a name means besides the algorithms of `SINGLE_LEVEL`, here and in the parts that take an algorithm's name.
RESERVED = ("auto", "direct", "hierarchical", "two_shot_symmetric", "send", "own", "all")


def register(name: str, collective: str, builder: Callable[..., Schedule]) -> None:
    """Add an algorithm of your own: from then on its name is valid wherever ``algorithm`` is an argument.

    Register it on every rank. What it builds is verified when it is first built for a number of ranks, and ranks whose
    schedules differ raise CollectiveMismatch. ``"auto"`` chooses it only where `dtcomm tune` has measured it.

    Args:
        name: The name: a letter, then letters, digits and underscores. A name may be registered for several
            collectives, each with a builder of its own.
        collective: The collective that it implements, one of `collectives`.
        builder: A function ``builder(ranks)``, or ``builder(ranks, root)`` for broadcast, reduce, gather and scatter,
            that returns the `dtcomm.schedule.Schedule` of that collective for any number of ranks from 1 on. It raises
            ValueError for numbers of ranks that it does not support. With an annotated argument ``chunks`` it lets the
            caller of `build` choose their number.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the name is not valid, means something else already, or there is no such collective.

    Example:
        All ranks add to rank 0, which copies the sum to all::

            def star(ranks: int) -> Schedule:
                builder = Builder("all_reduce", ranks, chunks=1)
                for rank in range(1, ranks):
                    builder.chunk(0).at(rank).reduce_to(0)
                for rank in range(1, ranks):
                    builder.chunk(0).at(0).copy_to(rank)
                return builder.build()

            dtcomm.algorithms.register("star", "all_reduce", star)
            dtcomm.all_reduce(tensor, algorithm="star")
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {type(name).__name__}")
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise ValueError(f"name: expected a letter, then letters, digits and underscores, got {name!r}")
    if collective not in COLLECTIVES:
        raise ValueError(f"collective: {collective!r} is not one of {', '.join(COLLECTIVES)}")
    if not callable(builder):
        raise TypeError(f"builder: expected a function of the number of ranks, got {type(builder).__name__}")
    if name in SINGLE_LEVEL or name in RESERVED:
        raise ValueError(f"name: {name!r} is taken; taken are {', '.join((*SINGLE_LEVEL, *RESERVED))}")
    if REGISTERED.get(name, {}).get(collective, builder) is not builder:
        raise ValueError(f"name: {name!r} is registered for {collective} already, with another builder")
    REGISTERED.setdefault(name, {})[collective] = builder


def is_registered(name: str) -> bool:
    """Return whether `register` added the algorithm, or a level of it."""
    kind, _, levels = name.partition(":")
    return any(part in REGISTERED for part in (kind, *split_levels(levels)))


def collectives() -> tuple[str, ...]:
    """Return the collectives that at least one algorithm implements."""
    return tuple(name for name in COLLECTIVES if single_level(name))


def available(collective: str) -> tuple[str, ...]:
    """Return the algorithms' names that `build` accepts for a collective.

    Args:
        collective: A collective's name, such as ``"all_reduce"``.

    Returns:
        The names; ``hierarchical`` stands for all its variants ``hierarchical:INSIDE/BETWEEN``.

    Raises:
        ValueError: If there is no such collective.

    Example:
        >>> from dtcomm import algorithms
        >>> algorithms.available("all_gather")
        ('ring', 'tree', 'halving', 'one_shot', 'hierarchical')
    """
    names = single_level(collective)
    if not names:
        raise ValueError(f"collective: {collective!r} is not one of {', '.join(collectives())}")
    return (*names, "hierarchical") if collective in HIERARCHICAL else names


def require(name: str, collective: str, besides: tuple[str, ...] = ()) -> None:
    """Check that a collective has an algorithm of this name, or that it is one of ``besides``, such as ``"auto"``.

    The ValueError lists the valid names.
    """
    names = (*besides, *available(collective))
    kind, colon, levels = name.partition(":")
    if kind not in names or (colon and kind != "hierarchical"):
        raise ValueError(
            f"algorithm: {name!r} is not one of {', '.join(names)}, which {collective} has{suggest(name, names)}"
        )
    if colon:
        _require_levels(name, collective, *split_levels(levels))


@functools.lru_cache(maxsize=256)
def build(
    name: str,
    collective: str,
    ranks: int,
    root: int = 0,
    chunks: int | None = None,
    hosts: Hosts | None = None,
) -> Schedule:
    """Build the schedule of a collective by an algorithm.

    Args:
        name: The algorithm's name, one of ``available(collective)``, or ``hierarchical:INSIDE/BETWEEN``.
        collective: The collective's name.
        ranks: The number of ranks, at least 1.
        root: The root of broadcast, reduce, gather and scatter; 0 for the others.
        chunks: How many chunks the tensor is cut into, for algorithms that leave a choice; None takes the algorithm's
            default.
        hosts: For ``hierarchical``: the sizes of the hosts in the order of the ranks, or a tuple of the ranks on each
            host. None means that all ranks are on one host.

    Returns:
        The schedule. It is a value: print it, verify it, or pass it to `dtcomm.run`.

    Raises:
        ValueError: If an argument is not valid. The message names it and lists what is valid.

    Example:
        >>> from dtcomm import algorithms
        >>> print(algorithms.build("ring", "all_reduce", 3))
        all_reduce ranks=3 chunks=3
        rank 0 | c2+1 | c1+1 | c0=1 | c2=1
        rank 1 | c0+2 | c2+2 | c1=2 | c0=2
        rank 2 | c1+0 | c0+0 | c2=0 | c1=0
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
        return build_single_level(name, collective, ranks, root, chunks)
    if chunks is not None:
        raise ValueError(f"chunks: hierarchical makes as many as its levels need, got chunks={chunks}")
    groups = hierarchical.ranks_by_host((ranks,) if hosts is None else hosts)
    if sum(map(len, groups)) != ranks:
        raise ValueError(f"hosts: {hosts!r} have {sum(map(len, groups))} ranks, expected {ranks}")
    inside, between = split_levels(levels)
    rooted = (root,) if collective in ROOTED else ()
    schedule = HIERARCHICAL[collective](
        groups,
        *rooted,
        inside=functools.partial(build_single_level, inside),
        between=functools.partial(build_single_level, between),
    )
    if is_registered(name):
        _verify_registered(name, collective, ranks, root, schedule)
    return schedule


def split_levels(levels: str) -> tuple[str, str]:
    """Return the algorithms inside hosts and between hosts of ``INSIDE/BETWEEN``; an empty name is the default."""
    inside, _, between = levels.partition("/")
    return inside or DEFAULT_INSIDE, between or DEFAULT_BETWEEN


def single_level(collective: str) -> tuple[str, ...]:
    """Return the names of `SINGLE_LEVEL` and `REGISTERED` that implement ``collective``."""
    return tuple(
        name for name, builders in (*SINGLE_LEVEL.items(), *REGISTERED.items()) if collective in builders
    )


@functools.lru_cache(maxsize=256)
def build_single_level(
    name: str, collective: str, ranks: int, root: int = 0, chunks: int | None = None
) -> Schedule:
    """Return the schedule by an algorithm of `single_level`, which must implement ``collective``."""
    options: dict[str, Any] = {"root": root} if collective in ROOTED else {}
    if chunks is not None:
        if not takes_chunks(name, collective):
            raise ValueError(f"chunks: {name} cuts {collective} into one chunk a rank, got chunks={chunks}")
        options["chunks"] = chunks
    schedule = _builder(name, collective)(ranks, **options)
    if name in REGISTERED:
        _verify_registered(name, collective, ranks, root, schedule)
    return schedule


def takes_chunks(name: str, collective: str) -> bool:
    """Return whether the caller may choose the number of chunks."""
    return "chunks" in getattr(_builder(name, collective), "__annotations__", {})


def _builder(name: str, collective: str) -> Callable[..., Schedule]:
    return (SINGLE_LEVEL.get(name) or REGISTERED[name])[collective]


def _verify_registered(name: str, collective: str, ranks: int, root: int, schedule: object) -> None:
    """Check what a user's builder returned."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"algorithm: the builder of {name!r} returned {type(schedule).__name__}, expected a Schedule"
        )
    built = schedule.collective, schedule.ranks, schedule.root
    if built != (collective, ranks, root):
        raise ValueError(
            f"algorithm: the builder of {name!r} returned a schedule of {built[0]}, ranks={built[1]}, root={built[2]}; "
            f"expected {collective}, ranks={ranks}, root={root}"
        )
    try:
        verify(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"algorithm {name!r}, {ranks} ranks: {error}") from error


def _require_levels(name: str, collective: str, inside: str, between: str) -> None:
    # Inside a host an all-reduce is a reduce-scatter and, later, an all-gather. Between hosts one_shot is not valid for
    # all_reduce: it would leave the representatives with sums that each encodes for its own host, which are equal
    # numbers but not the same bits.
    halves = ("reduce_scatter", "all_gather") if collective == "all_reduce" else (collective,)
    valid_inside = [
        algorithm for algorithm in single_level(halves[0]) if algorithm in single_level(halves[-1])
    ]
    valid_between = [
        algorithm
        for algorithm in single_level(collective)
        if (algorithm, collective) != ("one_shot", "all_reduce")
    ]
    for part, valid in ((inside, valid_inside), (between, valid_between)):
        if part not in valid:
            raise ValueError(
                f"algorithm: {part!r} in {name!r} is not one of {', '.join(valid)}; "
                "expected hierarchical:INSIDE/BETWEEN, like hierarchical:ring/tree"
            )
