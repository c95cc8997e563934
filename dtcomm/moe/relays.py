"""Blocks of equal size from every rank to every rank, sent first between hosts and then inside them.

A rank sends the blocks for all ranks of another host to one of them, its relay there, which passes them on. The bytes
between hosts are those of direct messages. Their number is smaller: a rank sends one message to each host instead of
one to each of its ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dtcomm.moe.placement import Hosts

#: ``exchange(blocks, sent, received, level)`` is an all-to-all: blocks to and from each rank; level: for reports.
Exchange = Callable[[torch.Tensor, Sequence[int], Sequence[int], str], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _Hop:
    """One of the two all-to-alls.

    Attributes:
        level: Between which ranks it is, for reports.
        order: The block at each place of the message, among the blocks that this rank has.
        sent: Number of blocks to each rank.
        received: Number of blocks from each rank.
    """

    level: str
    order: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Relays:
    """The two hops of one rank.

    Attributes:
        hops: Between hosts, then inside this rank's host.
        order: The arrived block of each source, in the order of the ranks.
    """

    hops: tuple[_Hop, _Hop]
    order: tuple[int, ...]

    @staticmethod
    def of(hosts: Hosts, rank: int) -> Relays:
        """The hops of ``rank``."""
        return _relays(hosts, rank)

    def exchange(self, blocks: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """Send a block to each rank.

        Args:
            blocks: [ranks, ...], the block for each rank.
            exchange: The all-to-all.

        Returns:
            [ranks, ...], the block of each rank.
        """
        for hop in self.hops:
            blocks = exchange(_reorder(blocks, hop.order), hop.sent, hop.received, hop.level)
        return _reorder(blocks, self.order)


def _reorder(blocks: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    # Not an index on the device, whose copy from the host a CUDA graph cannot capture.
    return torch.stack([blocks[number] for number in order]) if order else blocks[:0]


@functools.lru_cache(maxsize=64)
def _relays(hosts: Hosts, rank: int) -> Relays:
    ranks, own_host = range(len(hosts.ranks)), hosts.of_rank[rank]
    relays = hosts.relays_of(rank)
    # Whose blocks each member of this host receives for it, in the order of the sources.
    sources = {
        member: [source for source in ranks if hosts.relays_of(source)[own_host] == member]
        for member in hosts.members(rank)
    }
    blocks_for = [
        hosts.groups[hosts.of_rank[peer]] if relays[hosts.of_rank[peer]] == peer else () for peer in ranks
    ]
    members = hosts.members(rank)
    between = _Hop(
        level="between hosts, padded",
        order=tuple(block for blocks in blocks_for for block in blocks),
        sent=tuple(map(len, blocks_for)),
        received=tuple(len(members) if peer in sources[rank] else 0 for peer in ranks),
    )
    # This rank now has, of each of its sources, a block for each member.
    own = len(sources[rank])
    inside = _Hop(
        level="inside hosts, padded",
        order=tuple(
            number * len(members) + members.index(peer)
            for peer in ranks
            if peer in members
            for number in range(own)
        ),
        sent=tuple(own if peer in members else 0 for peer in ranks),
        received=tuple(len(sources[peer]) if peer in members else 0 for peer in ranks),
    )
    arrived = [source for peer in ranks if peer in members for source in sources[peer]]
    return Relays(hops=(between, inside), order=tuple(arrived.index(source) for source in ranks))
