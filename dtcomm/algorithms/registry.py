"""The one list of algorithms: which name makes which schedule of which collective."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dtcomm.algorithms import direct, ring, tree
from dtcomm.schedule.ir import ROOTED, Schedule

# name -> collective -> function of ranks, and of root and chunks where it takes them. In the order in which
# they are offered.
ALGORITHMS: dict[str, dict[str, Callable[..., Schedule]]] = {
    "ring": {
        "all_reduce": ring.all_reduce,
        "reduce_scatter": ring.reduce_scatter,
        "all_gather": ring.all_gather,
        "broadcast": ring.broadcast,
    },
    "tree": {
        "all_reduce": tree.all_reduce,
        "reduce_scatter": tree.reduce_scatter,
        "all_gather": tree.all_gather,
        "broadcast": tree.broadcast,
    },
    "one_shot": {
        "all_reduce": direct.one_shot,
        "reduce_scatter": direct.reduce_scatter,
        "all_gather": direct.all_gather,
        "broadcast": direct.broadcast,
    },
    "two_shot": {
        "all_reduce": direct.two_shot,
        "broadcast": direct.broadcast_two_shot,
    },
}


def collectives() -> tuple[str, ...]:
    """The collectives that some algorithm can do."""
    return tuple(dict.fromkeys(name for made in ALGORITHMS.values() for name in made))


def available(collective: str) -> tuple[str, ...]:
    """The names that ``build`` takes for ``collective``."""
    names = tuple(name for name, made in ALGORITHMS.items() if collective in made)
    if not names:
        raise ValueError(f"collective: {collective!r} is not one of {', '.join(collectives())}")
    return names


@functools.lru_cache(maxsize=256)
def build(name: str, collective: str, ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """The schedule of ``collective`` over ``ranks`` ranks by algorithm ``name``.

    ``root`` is for broadcast; ``chunks`` (default: what suits the algorithm) for those that leave a choice.
    Raises ValueError naming the argument and what is valid.
    """
    names = available(collective)
    if name not in names:
        raise ValueError(f"algorithm: {name!r} is not one of {', '.join(names)}, which {collective} has")
    if ranks < 1:
        raise ValueError(f"ranks: must be at least 1, got {ranks}")
    options: dict[str, Any] = {}
    if collective in ROOTED:
        options["root"] = root
        if not 0 <= root < ranks:
            raise ValueError(f"root: {root} is not a rank of 0..{ranks - 1}")
    elif root:
        raise ValueError(f"root: {collective} has none, got {root}")
    make = ALGORITHMS[name][collective]
    if chunks is not None:
        if "chunks" not in make.__annotations__:
            raise ValueError(f"chunks: {name} cuts {collective} into one chunk a rank, got chunks={chunks}")
        options["chunks"] = chunks
    return make(ranks, **options)
