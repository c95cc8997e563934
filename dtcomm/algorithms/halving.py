"""Recursive halving and doubling: ceil(log2 n) steps each way, with no more bytes than a ring.

The shards that a rank still holds for other ranks are halved in every step: n shards become ceil(n / 2), then half of
that rounded up, down to its own shard. In a step from ``far`` to ``near`` shards the rank sends the shards at distance
near … far - 1 to the rank at distance ``near``, for which they are at distance 0 … far - near - 1. Distances are
counted around the ring, so n need not be a power of two, and no pairing of ranks is needed first.

The pattern for any n: J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024. For powers
of two it is the halving and doubling of R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004,
with neighbours instead of pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dtcomm.algorithms import tree
from dtcomm.schedule.builder import reverse, schedule_of, sequence
from dtcomm.schedule.ir import Schedule, Transfer


def reduce_scatter(ranks: int) -> Schedule:
    """Every rank sends each shard but its own once, half of the remaining ones in each step."""
    transfers = tuple(
        Transfer(step, rank, (rank + near) % ranks, (rank + distance) % ranks, "reduce")
        for step, (near, far) in enumerate(distances(ranks))
        for rank in range(ranks)
        for distance in range(near, far)
    )
    return schedule_of("reduce_scatter", ranks, ranks, transfers)


def distances(ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (near, far) of each step of the reduce-scatter."""
    far = ranks
    while far > 1:
        near = (far + 1) // 2
        yield near, far
        far = near


def all_gather(ranks: int) -> Schedule:
    """The reduce-scatter in reverse: the shards that a rank holds double in each step."""
    transfers = tuple(reverse(reduce_scatter(ranks).transfers, "copy"))
    return schedule_of("all_gather", ranks, ranks, transfers)


def all_reduce(ranks: int) -> Schedule:
    """Halving, then doubling: a contribution is encoded at most ceil(log2 n) + 1 times."""
    return sequence("all_reduce", reduce_scatter(ranks), all_gather(ranks))


def broadcast(ranks: int, root: int = 0) -> Schedule:
    """A binomial tree scatters one chunk per rank from the root, then doubling gathers them on all ranks.

    Each phase takes ceil(log2 n) steps. A chunk that a rank has passed on during the scatter is not sent to it again.
    """
    scattered = tree.scatter(ranks, root)
    available = {(root, chunk) for chunk in range(ranks)} | {(t.dst, t.chunk) for t in scattered.transfers}
    gathered = all_gather(ranks)
    missing = tuple(t for t in gathered.transfers if (t.dst, t.chunk) not in available)
    return sequence("broadcast", scattered, replace(gathered, transfers=missing), root)


def reduce(ranks: int, root: int = 0) -> Schedule:
    """Halving leaves the sum of chunk c at rank c, then a binomial tree gathers the sums at the root."""
    return sequence("reduce", reduce_scatter(ranks), tree.gather(ranks, root), root)
