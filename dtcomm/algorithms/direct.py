"""Direct: every rank sends to every rank, in one step (one shot) or two (two shot), whatever the number of ranks."""

from __future__ import annotations

from itertools import permutations

from dtcomm.schedule.builder import schedule_of, sequence
from dtcomm.schedule.ir import Schedule, Transfer


def reduce_scatter(ranks: int) -> Schedule:
    """One shot: every shard is sent straight to its owner."""
    transfers = (Transfer(0, src, dst, dst, "reduce") for src, dst in permutations(range(ranks), 2))
    return schedule_of("reduce_scatter", ranks, ranks, transfers)


def all_gather(ranks: int) -> Schedule:
    """One shot: every owner sends its shard to all ranks."""
    transfers = (Transfer(0, src, dst, src, "copy") for src, dst in permutations(range(ranks), 2))
    return schedule_of("all_gather", ranks, ranks, transfers)


def one_shot(ranks: int, chunks: int = 1) -> Schedule:
    """All-reduce in one step: every rank sends its whole tensor to all others, and all sum the same bytes."""
    transfers = (
        Transfer(0, src, dst, chunk, "reduce")
        for src, dst in permutations(range(ranks), 2)
        for chunk in range(chunks)
    )
    return schedule_of("all_reduce", ranks, chunks, transfers)


def two_shot(ranks: int) -> Schedule:
    """All-reduce in two steps: rank c sums chunk c and sends the sum to all others."""
    return sequence("all_reduce", reduce_scatter(ranks), all_gather(ranks))


def broadcast(ranks: int, root: int = 0, chunks: int = 1) -> Schedule:
    """One shot: the root sends its whole tensor to all others."""
    transfers = (
        Transfer(0, root, dst, chunk, "copy")
        for dst in range(ranks)
        if dst != root
        for chunk in range(chunks)
    )
    return schedule_of("broadcast", ranks, chunks, transfers, root)


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
    return schedule_of("broadcast", ranks, ranks, scattered + root_chunk + shared, root)


def reduce(ranks: int, root: int = 0, chunks: int = 1) -> Schedule:
    """One shot: every rank sends its whole tensor to the root, which sums."""
    transfers = (
        Transfer(0, src, root, chunk, "reduce")
        for src in range(ranks)
        if src != root
        for chunk in range(chunks)
    )
    return schedule_of("reduce", ranks, chunks, transfers, root)


def reduce_two_shot(ranks: int, root: int = 0) -> Schedule:
    """Two shot: rank c sums chunk c and sends it to the root, which receives little more than two tensors."""
    return sequence("reduce", reduce_scatter(ranks), gather(ranks, root), root)


def gather(ranks: int, root: int = 0) -> Schedule:
    """One shot: every rank sends its shard to the root."""
    transfers = (Transfer(0, src, root, src, "copy") for src in range(ranks) if src != root)
    return schedule_of("gather", ranks, ranks, transfers, root)


def scatter(ranks: int, root: int = 0) -> Schedule:
    """One shot: the root sends every rank its shard."""
    transfers = (Transfer(0, root, dst, dst, "copy") for dst in range(ranks) if dst != root)
    return schedule_of("scatter", ranks, ranks, transfers, root)


def all_to_all(ranks: int) -> Schedule:
    """One shot: every rank sends every other rank its shard."""
    transfers = (
        Transfer(0, src, dst, src * ranks + dst, "copy") for src, dst in permutations(range(ranks), 2)
    )
    return schedule_of("all_to_all", ranks, ranks**2, transfers)
