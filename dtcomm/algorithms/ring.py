"""Ring: every rank sends to its right neighbour only. A ring moves the fewest bytes per link in the most steps."""

from __future__ import annotations

from dataclasses import replace

from dtcomm.schedule.builder import reverse, schedule_of, sequence
from dtcomm.schedule.ir import Schedule, Transfer


def reduce_scatter(ranks: int) -> Schedule:
    """Shard c starts at rank c + 1 and collects one contribution per step until it reaches rank c.

    In step s rank r therefore sends shard (r - 1 - s) modulo ranks.
    """
    transfers = (
        Transfer(step, rank, (rank + 1) % ranks, (rank - 1 - step) % ranks, "reduce")
        for step in range(ranks - 1)
        for rank in range(ranks)
    )
    return schedule_of("reduce_scatter", ranks, ranks, transfers)


def all_gather(ranks: int) -> Schedule:
    """Shard c starts at rank c and is passed on until all ranks have it."""
    transfers = (
        Transfer(step, rank, (rank + 1) % ranks, (rank - step) % ranks, "copy")
        for step in range(ranks - 1)
        for rank in range(ranks)
    )
    return schedule_of("all_gather", ranks, ranks, transfers)


def all_reduce(ranks: int) -> Schedule:
    """Reduce-scatter, then all-gather: each chunk goes around the ring twice, and every rank encodes it once."""
    return sequence("all_reduce", reduce_scatter(ranks), all_gather(ranks))


def broadcast(ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """A chain from the root. Chunk c follows c steps behind chunk 0; by default there are as many chunks as ranks."""
    chunks = ranks if chunks is None else chunks
    transfers = (
        Transfer(hop + chunk, (root + hop) % ranks, (root + hop + 1) % ranks, chunk, "copy")
        for hop in range(ranks - 1)
        for chunk in range(chunks)
    )
    return schedule_of("broadcast", ranks, chunks, transfers, root)


def reduce(ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """The chain of the broadcast in reverse, every rank adding its contribution; by default as many chunks as ranks."""
    chain = broadcast(ranks, root, chunks)
    return replace(chain, collective="reduce", transfers=tuple(reverse(chain.transfers, "reduce")))
