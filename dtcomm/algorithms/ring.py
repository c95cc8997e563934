"""Ring: every rank sends to its right neighbour only; the least bytes per link, the most steps."""

from __future__ import annotations

from dtcomm.algorithms.compose import backwards, then
from dtcomm.schedule.ir import Schedule, Transfer


def reduce_scatter(ranks: int) -> Schedule:
    """Shard c starts at rank c + 1 and gathers one contribution a step until it reaches rank c."""
    return Schedule(
        collective="reduce_scatter",
        ranks=ranks,
        chunks=ranks,
        transfers=tuple(
            Transfer(step, rank, (rank + 1) % ranks, (rank - 1 - step) % ranks, "reduce")
            for step in range(ranks - 1)
            for rank in range(ranks)
        ),
    )


def all_gather(ranks: int) -> Schedule:
    """Shard c starts at rank c and is passed on until all have it."""
    return Schedule(
        collective="all_gather",
        ranks=ranks,
        chunks=ranks,
        transfers=tuple(
            Transfer(step, rank, (rank + 1) % ranks, (rank - step) % ranks, "copy")
            for step in range(ranks - 1)
            for rank in range(ranks)
        ),
    )


def all_reduce(ranks: int) -> Schedule:
    """Reduce-scatter, then all-gather: each chunk goes round twice and is encoded by every rank once."""
    return then("all_reduce", reduce_scatter(ranks), all_gather(ranks))


def broadcast(ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """A chain from the root; chunk c follows c steps behind chunk 0. By default one chunk a rank."""
    chunks = ranks if chunks is None else chunks
    return Schedule(
        collective="broadcast",
        ranks=ranks,
        chunks=chunks,
        root=root,
        transfers=tuple(
            Transfer(hop + chunk, (root + hop) % ranks, (root + hop + 1) % ranks, chunk, "copy")
            for hop in range(ranks - 1)
            for chunk in range(chunks)
        ),
    )


def reduce(ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """The chain of the broadcast backwards, every rank adding its own. By default one chunk a rank."""
    chain = broadcast(ranks, root, chunks)
    transfers = tuple(backwards(chain.transfers, "reduce"))
    return Schedule(**{**vars(chain), "collective": "reduce", "transfers": transfers})
