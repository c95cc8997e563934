"""The algorithms that know nothing of hosts: which name makes which schedule of which collective."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dtcomm.algorithms import direct, double_tree, halving, ring, tree
from dtcomm.schedule.ir import ROOTED, Schedule

# name -> collective -> function of ranks, and of root and chunks where it takes them. In the order in which
# they are offered.
ALGORITHMS: dict[str, dict[str, Callable[..., Schedule]]] = {
    "ring": {
        "all_reduce": ring.all_reduce,
        "reduce_scatter": ring.reduce_scatter,
        "all_gather": ring.all_gather,
        "broadcast": ring.broadcast,
        "reduce": ring.reduce,
    },
    "tree": {
        "all_reduce": tree.all_reduce,
        "reduce_scatter": tree.reduce_scatter,
        "all_gather": tree.all_gather,
        "broadcast": tree.broadcast,
        "reduce": tree.reduce,
        "gather": tree.gather,
        "scatter": tree.scatter,
        "all_to_all": tree.all_to_all,
    },
    "double_tree": {
        "all_reduce": double_tree.all_reduce,
        "broadcast": double_tree.broadcast,
        "reduce": double_tree.reduce,
    },
    "halving": {
        "all_reduce": halving.all_reduce,
        "reduce_scatter": halving.reduce_scatter,
        "all_gather": halving.all_gather,
        "broadcast": halving.broadcast,
        "reduce": halving.reduce,
    },
    "one_shot": {
        "all_reduce": direct.one_shot,
        "reduce_scatter": direct.reduce_scatter,
        "all_gather": direct.all_gather,
        "broadcast": direct.broadcast,
        "reduce": direct.reduce,
        "gather": direct.gather,
        "scatter": direct.scatter,
        "all_to_all": direct.all_to_all,
    },
    "two_shot": {
        "all_reduce": direct.two_shot,
        "broadcast": direct.broadcast_two_shot,
        "reduce": direct.reduce_two_shot,
    },
}


def available(collective: str) -> tuple[str, ...]:
    """The names of ``ALGORITHMS`` that can do ``collective``."""
    return tuple(name for name, made in ALGORITHMS.items() if collective in made)


@functools.lru_cache(maxsize=256)
def build(name: str, collective: str, ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """The schedule of ``collective`` by algorithm ``name``, which must have it, over ``ranks`` ranks."""
    options: dict[str, Any] = {"root": root} if collective in ROOTED else {}
    make = ALGORITHMS[name][collective]
    if chunks is not None:
        if not takes_chunks(name, collective):
            raise ValueError(f"chunks: {name} cuts {collective} into one chunk a rank, got chunks={chunks}")
        options["chunks"] = chunks
    return make(ranks, **options)


def takes_chunks(name: str, collective: str) -> bool:
    """Whether the number of chunks is the caller's choice."""
    return "chunks" in ALGORITHMS[name][collective].__annotations__
