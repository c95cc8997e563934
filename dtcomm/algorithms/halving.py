"""Recursive halving and doubling: ceil(log2 n) steps each way, and no byte more than round a ring.

What a rank still holds for others is halved in every step: n shards become ceil(n / 2), then half of that rounded
up, down to its own. In a step from ``far`` to ``near`` shards it sends those at distance near … far - 1 to the
rank at distance ``near``, for which they are at distance 0 … far - near - 1. Distances are counted round the ring,
so n need not be a power of two, and nobody waits for ranks to be paired up first. The pattern for any n: J. L.
Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024; for powers of two it is the halving
and doubling of R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004, with neighbours
instead of pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtcomm.algorithms import tree
from dtcomm.algorithms.compose import backwards, then
from dtcomm.schedule.ir import Schedule, Transfer


def reduce_scatter(ranks: int) -> Schedule:
    """Every rank sends each shard but its own once, half of what is left in each step."""
    transfers = tuple(
        Transfer(step, rank, (rank + near) % ranks, (rank + distance) % ranks, "reduce")
        for step, (near, far) in enumerate(distances(ranks))
        for rank in range(ranks)
        for distance in range(near, far)
    )
    return Schedule(collective="reduce_scatter", ranks=ranks, chunks=ranks, transfers=transfers)


def distances(ranks: int) -> Iterator[tuple[int, int]]:
    """(near, far) of each step of the reduce-scatter."""
    far = ranks
    while far > 1:
        near = (far + 1) // 2
        yield near, far
        far = near


def all_gather(ranks: int) -> Schedule:
    """The way of the reduce-scatter backwards: what a rank holds doubles in each step."""
    transfers = tuple(backwards(reduce_scatter(ranks).transfers, "copy"))
    return Schedule(collective="all_gather", ranks=ranks, chunks=ranks, transfers=transfers)


def all_reduce(ranks: int) -> Schedule:
    """Halving, then doubling: a contribution is encoded at most ceil(log2 n) + 1 times."""
    return then("all_reduce", reduce_scatter(ranks), all_gather(ranks))


def broadcast(ranks: int, root: int = 0) -> Schedule:
    """The root deals one chunk a rank out along a binomial tree, then doubling brings them to all.

    In ceil(log2 n) steps each; what a rank has had in its hands on the way down is not sent to it again.
    """
    deal = tree.scatter(ranks, root)
    held = {(root, chunk) for chunk in range(ranks)} | {(t.dst, t.chunk) for t in deal.transfers}
    gather = all_gather(ranks)
    wanted = tuple(t for t in gather.transfers if (t.dst, t.chunk) not in held)
    return then("broadcast", deal, Schedule(**{**vars(gather), "transfers": wanted}), root)


def reduce(ranks: int, root: int = 0) -> Schedule:
    """Halving leaves the sum of chunk c at rank c, and a binomial tree collects them at the root."""
    return then("reduce", reduce_scatter(ranks), tree.gather(ranks, root), root)
