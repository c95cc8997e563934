"""Binomial tree: the fewest steps, ceil(log2 n) each way; a rank may speak for the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dtcomm.schedule.ir import Schedule, Transfer


def _depth(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _down(ranks: int, root: int, chunk: int, first: int = 0) -> Iterator[Transfer]:
    # Places count from the root. In each step everybody who has the chunk reaches half as far as in the step
    # before.
    for step in range(_depth(ranks)):
        reach = 1 << (_depth(ranks) - 1 - step)
        for place in range(0, ranks - reach, 2 * reach):
            src, dst = (root + place) % ranks, (root + place + reach) % ranks
            yield Transfer(first + step, src, dst, chunk, "copy")


def _up(ranks: int, root: int, chunk: int) -> Iterator[Transfer]:
    last = _depth(ranks) - 1
    for t in _down(ranks, root, chunk):
        yield Transfer(last - t.step, t.dst, t.src, chunk, "reduce")


def _path(ranks: int, root: int, rank: int, chunk: int) -> Iterator[Transfer]:
    # The way down to one rank: its place's bits from the highest, so that paths share steps with ``_down``.
    place = (rank - root) % ranks
    for step in range(_depth(ranks)):
        reach = 1 << (_depth(ranks) - 1 - step)
        if place & reach:
            before = place & ~(2 * reach - 1)
            yield Transfer(step, (root + before) % ranks, (root + before + reach) % ranks, chunk, "copy")


def _all(
    ranks: int, chunks: int, tree: Callable[[int, int, int], Iterator[Transfer]]
) -> tuple[Transfer, ...]:
    # Chunk c's tree has its root at rank c, so that several chunks spread the load.
    return tuple(t for chunk in range(chunks) for t in tree(ranks, chunk % ranks, chunk))


def reduce_scatter(ranks: int) -> Schedule:
    """Every shard is added up along a tree of its own, rooted at its owner."""
    return Schedule(collective="reduce_scatter", ranks=ranks, chunks=ranks, transfers=_all(ranks, ranks, _up))


def all_gather(ranks: int) -> Schedule:
    """Every shard is handed down a tree of its own, rooted at its owner."""
    return Schedule(collective="all_gather", ranks=ranks, chunks=ranks, transfers=_all(ranks, ranks, _down))


def all_reduce(ranks: int, chunks: int | None = None) -> Schedule:
    """Up the tree, then down again; one chunk by default, chunk c's tree rooted at rank c modulo ranks."""

    def tree(ranks: int, root: int, chunk: int) -> Iterator[Transfer]:
        yield from _up(ranks, root, chunk)
        yield from _down(ranks, root, chunk, first=_depth(ranks))

    chunks = 1 if chunks is None else chunks
    return Schedule(collective="all_reduce", ranks=ranks, chunks=chunks, transfers=_all(ranks, chunks, tree))


def broadcast(ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """Down the tree from the root; one chunk by default."""
    chunks = 1 if chunks is None else chunks
    return Schedule(
        collective="broadcast",
        ranks=ranks,
        chunks=chunks,
        root=root,
        transfers=tuple(t for chunk in range(chunks) for t in _down(ranks, root, chunk)),
    )


def reduce(ranks: int, root: int = 0, chunks: int | None = None) -> Schedule:
    """Up the tree to the root; one chunk by default."""
    chunks = 1 if chunks is None else chunks
    return Schedule(
        collective="reduce",
        ranks=ranks,
        chunks=chunks,
        root=root,
        transfers=tuple(t for chunk in range(chunks) for t in _up(ranks, root, chunk)),
    )


def scatter(ranks: int, root: int = 0) -> Schedule:
    """The root gives each half of the tree its shards at once; every shard goes down its own branch."""
    return Schedule(
        collective="scatter",
        ranks=ranks,
        chunks=ranks,
        root=root,
        transfers=tuple(t for rank in range(ranks) for t in _path(ranks, root, rank, rank)),
    )


def gather(ranks: int, root: int = 0) -> Schedule:
    """The way of the scatter backwards; a rank passes on the bytes of all below it."""
    last = _depth(ranks) - 1
    return Schedule(
        collective="gather",
        ranks=ranks,
        chunks=ranks,
        root=root,
        transfers=tuple(
            Transfer(last - t.step, t.dst, t.src, t.chunk, "copy") for t in scatter(ranks, root).transfers
        ),
    )


def all_to_all(ranks: int) -> Schedule:
    """Every rank's scatter at once: ceil(log2 n) steps, in which each message makes up to that many hops.

    About n/2 log2 n shards leave a rank instead of n - 1, in log2 n messages instead of n - 1 (J. Bruck et al.,
    "Efficient Algorithms for All-to-All Communications", 1997): for many ranks and short messages.
    """
    return Schedule(
        collective="all_to_all",
        ranks=ranks,
        chunks=ranks**2,
        transfers=tuple(
            t
            for src in range(ranks)
            for dst in range(ranks)
            for t in _path(ranks, src, dst, src * ranks + dst)
        ),
    )
