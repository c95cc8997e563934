"""Direct: every rank sends to every rank, in one step (one shot) or two (two shot), whatever the number of ranks."""

from __future__ import annotations

from itertools import permutations

from dtcomm.schedule.builder import sequence
from dtcomm.schedule.ir import Schedule, Transfer


def reduce_scatter(ranks: int) -> Schedule:
    """One shot: every shard is sent straight to its owner."""
    return Schedule(
        collective="reduce_scatter",
        ranks=ranks,
        chunks=ranks,
        transfers=tuple(Transfer(0, src, dst, dst, "reduce") for src, dst in permutations(range(ranks), 2)),
    )


def all_gather(ranks: int) -> Schedule:
    """One shot: every owner sends its shard to all ranks."""
    return Schedule(
        collective="all_gather",
        ranks=ranks,
        chunks=ranks,
        transfers=tuple(Transfer(0, src, dst, src, "copy") for src, dst in permutations(range(ranks), 2)),
    )


def one_shot(ranks: int, chunks: int | None = None) -> Schedule:
    """All-reduce in one step: every rank sends its whole tensor to all others, and all sum the same bytes."""
    chunks = 1 if chunks is None else chunks
    return Schedule(
        collective="all_reduce",
        ranks=ranks,
        chunks=chunks,
        transfers=tuple(
            Transfer(0, src, dst, chunk, "reduce")
            for src, dst in permutations(range(ranks), 2)
            for chunk in range(chunks)
        ),
    )


def two_shot(ranks: int) -> Schedule:
    """All-reduce in two steps: rank c sums chunk c and sends the sum to all others."""
    return sequence("all_reduce", reduce_scatter(ranks), all_gather(ranks))


def broadcast(ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """One shot: the root sends its whole tensor to all others."""
    chunks = 1 if chunks is None else chunks
    return Schedule(
        collective="broadcast",
        ranks=ranks,
        chunks=chunks,
        root=root,
        transfers=tuple(
            Transfer(0, root, dst, chunk, "copy")
            for dst in range(ranks)
            if dst != root
            for chunk in range(chunks)
        ),
    )


def broadcast_two_shot(ranks: int, root: int = 0) -> Schedule:
    """Two shot: the root scatters the chunks, then rank c sends chunk c to all others.

    The root sends little more than the tensor once.
    """
    scattered = tuple(Transfer(0, root, chunk, chunk, "copy") for chunk in range(ranks) if chunk != root)
    root_chunk = tuple(Transfer(0, root, dst, root, "copy") for dst in range(ranks) if dst != root)
    shared = tuple(
        Transfer(1, src, dst, src, "copy")
        for src, dst in permutations(range(ranks), 2)
        if root not in (src, dst)
    )
    return Schedule(
        collective="broadcast",
        ranks=ranks,
        chunks=ranks,
        root=root,
        transfers=scattered + root_chunk + shared,
    )


def reduce(ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """One shot: every rank sends its whole tensor to the root, which sums."""
    chunks = 1 if chunks is None else chunks
    return Schedule(
        collective="reduce",
        ranks=ranks,
        chunks=chunks,
        root=root,
        transfers=tuple(
            Transfer(0, src, root, chunk, "reduce")
            for src in range(ranks)
            if src != root
            for chunk in range(chunks)
        ),
    )


def reduce_two_shot(ranks: int, root: int = 0) -> Schedule:
    """Two shot: rank c sums chunk c and sends it to the root, which receives little more than two tensors."""
    return sequence("reduce", reduce_scatter(ranks), gather(ranks, root), root)


def gather(ranks: int, root: int = 0) -> Schedule:
    """One shot: every rank sends its shard to the root."""
    return Schedule(
        collective="gather",
        ranks=ranks,
        chunks=ranks,
        root=root,
        transfers=tuple(Transfer(0, src, root, src, "copy") for src in range(ranks) if src != root),
    )


def scatter(ranks: int, root: int = 0) -> Schedule:
    """One shot: the root sends every rank its shard."""
    return Schedule(
        collective="scatter",
        ranks=ranks,
        chunks=ranks,
        root=root,
        transfers=tuple(Transfer(0, root, dst, dst, "copy") for dst in range(ranks) if dst != root),
    )


def all_to_all(ranks: int) -> Schedule:
    """One shot: every rank sends every other rank its shard."""
    return Schedule(
        collective="all_to_all",
        ranks=ranks,
        chunks=ranks**2,
        transfers=tuple(
            Transfer(0, src, dst, src * ranks + dst, "copy") for src, dst in permutations(range(ranks), 2)
        ),
    )
