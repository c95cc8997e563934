"""Binomial tree: the fewest steps, ceil(log2 n) each way. An inner rank sends the whole tensor in several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dtcomm.schedule.builder import schedule_of
from dtcomm.schedule.ir import Schedule, Transfer


def _depth(ranks: int) -> int:
    return (ranks - 1).bit_length()


def copy_down(ranks: int, root: int, chunk: int, first_step: int = 0) -> Iterator[Transfer]:
    """Yield the transfers that copy ``chunk`` from ``root`` to all ranks."""
    # Places count from the root. In each step every rank that has the chunk reaches half as far as in the step before.
    for step in range(_depth(ranks)):
        reach = 1 << (_depth(ranks) - 1 - step)
        for place in range(0, ranks - reach, 2 * reach):
            src, dst = (root + place) % ranks, (root + place + reach) % ranks
            yield Transfer(first_step + step, src, dst, chunk, "copy")


def reduce_up(ranks: int, root: int, chunk: int) -> Iterator[Transfer]:
    """Yield the transfers that sum ``chunk`` of all ranks at ``root``."""
    last = _depth(ranks) - 1
    for t in copy_down(ranks, root, chunk):
        yield Transfer(last - t.step, t.dst, t.src, chunk, "reduce")


def path_down(ranks: int, root: int, rank: int, chunk: int) -> Iterator[Transfer]:
    """Yield the transfers that bring ``chunk`` from ``root`` to one rank, in the steps of `copy_down`."""
    # The path follows the bits of the rank's place, from the highest on.
    place = (rank - root) % ranks
    for step in range(_depth(ranks)):
        reach = 1 << (_depth(ranks) - 1 - step)
        if place & reach:
            before = place & ~(2 * reach - 1)
            yield Transfer(step, (root + before) % ranks, (root + before + reach) % ranks, chunk, "copy")


def _tree_per_chunk(
    ranks: int, chunks: int, tree: Callable[[int, int, int], Iterator[Transfer]]
) -> tuple[Transfer, ...]:
    # Chunk c's tree has its root at rank c, so that several chunks distribute the load.
    return tuple(t for chunk in range(chunks) for t in tree(ranks, chunk % ranks, chunk))


def reduce_scatter(ranks: int) -> Schedule:
    """Every shard is summed along a tree of its own, with its owner as the root."""
    transfers = _tree_per_chunk(ranks, ranks, reduce_up)
    return schedule_of("reduce_scatter", ranks, ranks, transfers)


def all_gather(ranks: int) -> Schedule:
    """Every shard is copied down a tree of its own, with its owner as the root."""
    transfers = _tree_per_chunk(ranks, ranks, copy_down)
    return schedule_of("all_gather", ranks, ranks, transfers)


def all_reduce(ranks: int, chunks: int = 1) -> Schedule:
    """Up the tree, then down again. One chunk by default; chunk c's tree has its root at rank c modulo ranks."""

    def tree(ranks: int, root: int, chunk: int) -> Iterator[Transfer]:
        yield from reduce_up(ranks, root, chunk)
        yield from copy_down(ranks, root, chunk, first_step=_depth(ranks))

    return schedule_of("all_reduce", ranks, chunks, _tree_per_chunk(ranks, chunks, tree))


def broadcast(ranks: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Down the tree from the root; one chunk by default."""
    transfers = (t for chunk in range(chunks) for t in copy_down(ranks, root, chunk))
    return schedule_of("broadcast", ranks, chunks, transfers, root)


def reduce(ranks: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Up the tree to the root; one chunk by default."""
    transfers = (t for chunk in range(chunks) for t in reduce_up(ranks, root, chunk))
    return schedule_of("reduce", ranks, chunks, transfers, root)


def scatter(ranks: int, root: int = 0) -> Schedule:
    """The root sends each half of the tree its shards together; every shard takes its own path down."""
    transfers = (t for rank in range(ranks) for t in path_down(ranks, root, rank, rank))
    return schedule_of("scatter", ranks, ranks, transfers, root)


def gather(ranks: int, root: int = 0) -> Schedule:
    """The scatter in reverse: a rank passes on the shards of all ranks below it."""
    last = _depth(ranks) - 1
    transfers = (
        Transfer(last - t.step, t.dst, t.src, t.chunk, "copy") for t in scatter(ranks, root).transfers
    )
    return schedule_of("gather", ranks, ranks, transfers, root)


def all_to_all(ranks: int) -> Schedule:
    """The scatters of all ranks at once: ceil(log2 n) steps, and each shard takes up to as many hops.

    About n/2 log2 n shards leave a rank instead of n - 1, in log2 n messages instead of n - 1 (J. Bruck et al.,
    "Efficient Algorithms for All-to-All Communications", 1997): for many ranks and short messages.
    """
    transfers = (
        t
        for src in range(ranks)
        for dst in range(ranks)
        for t in path_down(ranks, src, dst, src * ranks + dst)
    )
    return schedule_of("all_to_all", ranks, ranks**2, transfers)
