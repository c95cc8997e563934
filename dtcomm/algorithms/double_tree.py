"""Double binary tree: two complementary trees, each for half of the chunks, so that no rank has children in both.

In a single tree the leaves, half of all ranks, never send down and never sum, while the inner ranks do all the work.
Here a rank is an inner node of at most one tree and a leaf of the other: it receives each byte once and sends each
byte about once, in floor(log2 n) steps each way. P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtcomm.schedule.builder import reverse, schedule_of
from dtcomm.schedule.ir import Schedule, Transfer

CHUNKS = 2


def _parent(node: int, nodes: int) -> int:
    """Return the parent of ``node`` in the in-order binary tree over 1 … ``nodes``; 0 for the root.

    A node's height is the number of zeros at the end of its binary form, so odd nodes are leaves. Replacing the bits up
    to each higher place by 10…0 gives its ancestors in the infinite tree; the nearest one that exists is the parent.
    """
    place = 2 * (node & -node)
    while place <= nodes:
        ancestor = node & ~(2 * place - 1) | place
        if ancestor <= nodes:
            return ancestor
        place *= 2
    return 0


def _down(ranks: Sequence[int], chunk: int, first_step: int) -> tuple[int, list[Transfer]]:
    """Return the tree's root and its transfers from step ``first_step`` on; ``ranks[i]`` is node i + 1."""
    nodes = len(ranks)
    parents = {node: _parent(node, nodes) for node in range(1, nodes + 1)}
    depth = {0: -1}

    def depth_of(node: int) -> int:
        if node not in depth:
            depth[node] = 1 + depth_of(parents[node])
        return depth[node]

    transfers = [
        Transfer(first_step + depth_of(parent), ranks[parent - 1], ranks[node - 1], chunk, "copy")
        for node, parent in parents.items()
        if parent
    ]
    return next(ranks[node - 1] for node, parent in parents.items() if not parent), transfers


def _node_order(ranks: Sequence[int], chunk: int) -> list[int]:
    # Odd chunks take the same tree with all ranks one node further, which makes inner nodes of the leaves.
    return [ranks[(place + chunk % 2) % len(ranks)] for place in range(len(ranks))]


def _up(transfers: list[Transfer]) -> Iterator[Transfer]:
    # All children of a node send in one step, so that they form one sum with its own contribution.
    height: dict[int, int] = {}
    for t in sorted(transfers, key=lambda t: -t.step):
        height[t.src] = max(height.get(t.src, 0), 1 + height.get(t.dst, 0))
    for t in reverse(transfers, "reduce"):
        yield Transfer(height[t.dst] - 1, t.src, t.dst, t.chunk, "reduce")


def all_reduce(ranks: int, chunks: int = CHUNKS) -> Schedule:
    """Up both trees, then down again. A contribution is encoded at most floor(log2 n) + 1 times."""
    transfers: list[Transfer] = []
    for chunk in range(chunks):
        order = _node_order(range(ranks), chunk)
        _, down = _down(order, chunk, ranks.bit_length() - 1)
        transfers += [*_up(down), *down]
    return schedule_of("all_reduce", ranks, chunks, transfers)


def broadcast(ranks: int, root: int = 0, chunks: int = CHUNKS) -> Schedule:
    """The root sends each half to the root of a tree over the other ranks, so it sends every byte once."""
    others = [(root + place) % ranks for place in range(1, ranks)]
    transfers: list[Transfer] = []
    for chunk in range(chunks if others else 0):
        top, down = _down(_node_order(others, chunk), chunk, 1)
        transfers += [Transfer(0, root, top, chunk, "copy"), *down]
    return schedule_of("broadcast", ranks, chunks, transfers, root)


def reduce(ranks: int, root: int = 0, chunks: int = CHUNKS) -> Schedule:
    """The paths of the broadcast in reverse."""
    down = broadcast(ranks, root, chunks).transfers
    transfers = [t for chunk in range(chunks) for t in _up([d for d in down if d.chunk == chunk])]
    return schedule_of("reduce", ranks, chunks, transfers, root)
