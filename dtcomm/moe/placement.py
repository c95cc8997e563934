"""Which ranks share a host, how many rows each rank sends to each other one, and the relays between hosts.

A rank sends the rows for all ranks of another host to one of them, its relay there, which passes them on. `Relays` does
so with blocks of equal size: the bytes between hosts are those of direct messages, in one message to each host instead
of one to each of its ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dtcomm.collectives import all_gather
from dtcomm.errors import CollectiveMismatch
from dtcomm.moe.hops import constant, unique_destinations
from dtcomm.moe.route import HEADER, mismatch

#: ``exchange(blocks, sent, received, level)`` is an all-to-all: blocks to and from each rank; level: for reports.
Exchange = Callable[[torch.Tensor, Sequence[int], Sequence[int], str], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a group's ranks.

    Attributes:
        groups: The ranks of each host.
        ranks: All ranks, host by host: the order in which a token's rows are summed.
        position: The position of each rank in ``ranks``.
        of_rank: The host of each rank.
        of_position: The host of each position.
    """

    groups: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    position: tuple[int, ...]
    of_rank: tuple[int, ...]
    of_position: tuple[int, ...]

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(groups: tuple[tuple[int, ...], ...]) -> Hosts:
        """The hosts with these ranks, as `dtcomm.collectives.groups.host_groups` returns them."""
        ranks = tuple(rank for members in groups for rank in members)
        of_position = tuple(host for host, members in enumerate(groups) for _ in members)
        position = tuple(ranks.index(rank) for rank in range(len(ranks)))
        of_rank = tuple(of_position[place] for place in position)
        return Hosts(groups=groups, ranks=ranks, position=position, of_rank=of_rank, of_position=of_position)

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.groups)

    @property
    def has_two_levels(self) -> bool:
        """Whether there are several hosts and one of them has several ranks."""
        return 1 < len(self.groups) < len(self.ranks)

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's host."""
        return self.groups[self.of_rank[rank]]

    def positions_of(self, ranks: torch.Tensor) -> torch.Tensor:
        """The position of each of these ranks, int64 [tokens, choices]."""
        return constant(self.position, ranks.device).index_select(0, ranks.reshape(-1)).view_as(ranks)

    def hosts_of(self, positions: torch.Tensor) -> torch.Tensor:
        """The host of each of these positions, int64 [tokens, columns]; ``count`` of the one behind the last."""
        hosts = constant([*self.of_position, self.count], positions.device)
        return hosts.index_select(0, positions.reshape(-1)).view_as(positions)

    def destinations_inside(self, experts: torch.Tensor, local_experts: int, rank: int) -> torch.Tensor:
        """The ranks of a rank's host that hold some of these experts, as `unique_destinations` returns them.

        ``experts`` are int64 [tokens, choices]; -1 is none. Each rank has ``local_experts``.
        """
        members = self.members(rank)
        # The positions of a host's ranks follow each other.
        places = self.positions_of(experts.clamp(min=0) // local_experts) - self.position[members[0]]
        here = (experts >= 0) & (places >= 0) & (places < len(members))
        return unique_destinations(torch.where(here, places, len(members)), len(members))

    def relays_of(self, rank: int) -> list[int]:
        """The rank of each host that receives the rows of ``rank`` for this host and passes them on."""
        place = self.members(rank).index(rank)
        return [members[place % len(members)] for members in self.groups]


class Counts:
    """How many rows go where, from the tables of all ranks.

    ``lists`` is the table of each rank: header, counts of experts, of ranks by position, and of hosts.
    """

    def __init__(self, lists: list[list[int]], num_experts: int, world_size: int, hosts: Hosts) -> None:
        begin = HEADER
        self._of_experts = [row[begin : begin + num_experts] for row in lists]
        begin += num_experts
        # [source][rank]: a source's tokens that go to a rank
        self._of_ranks = [[row[begin + hosts.position[rank]] for rank in range(world_size)] for row in lists]
        self._of_hosts = [row[begin + world_size :] for row in lists]  # [source][host]
        self._hosts = hosts
        self._ranks = range(world_size)

    def rows(self, experts: range) -> list[int]:
        """The number of rows of each of these experts."""
        return [sum(counts[expert] for counts in self._of_experts) for expert in experts]

    def between_ranks(self, rank: int) -> tuple[list[int], list[int]]:
        """What a rank sends to and receives from each rank, flat."""
        return self._of_ranks[rank], [counts[rank] for counts in self._of_ranks]

    def between_hosts(self, rank: int) -> tuple[list[int], list[int]]:
        """What a rank sends to and receives from each rank in the hop between hosts."""
        host, sent = self._hosts.of_rank[rank], [0 for _ in self._ranks]
        for peer, count in zip(self._hosts.relays_of(rank), self._of_hosts[rank], strict=True):
            sent[peer] = count
        received = [
            self._of_hosts[source][host] if self._hosts.relays_of(source)[host] == rank else 0
            for source in self._ranks
        ]
        return sent, received

    def inside_host(self, rank: int) -> tuple[list[int], list[int]]:
        """What a rank sends to and receives from each rank in the hop inside its host."""
        host = self._hosts.of_rank[rank]
        sent, received = [0 for _ in self._ranks], [0 for _ in self._ranks]
        for source in self._ranks:
            relay = self._hosts.relays_of(source)[host]
            received[relay] += self._of_ranks[source][rank]
            if relay == rank:
                for peer in self._hosts.members(rank):
                    sent[peer] += self._of_ranks[source][peer]
        return sent, received


def gather_tables(
    table: torch.Tensor, world_size: int, num_experts: int, group: dist.ProcessGroup | None
) -> list[list[int]]:
    """Return the tables of all ranks; the host waits for the device."""
    gathered = table.new_empty((world_size, len(table)))
    try:
        all_gather(gathered, table, group=group)
    except CollectiveMismatch as error:
        raise mismatch(num_experts, error) from None
    lists: list[list[int]] = gathered.tolist()
    return lists


@dataclass(frozen=True, kw_only=True)
class _RelayHop:
    """One of the two all-to-alls, with the numbers of blocks to and from each rank.

    ``order`` is the block at each place of the message, among the blocks that this rank has.
    """

    level: str
    order: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Relays:
    """The two hops of one rank, between hosts and then inside its host.

    ``order`` is the arrived block of each source, in the order of the ranks.
    """

    hops: tuple[_RelayHop, _RelayHop]
    order: tuple[int, ...]

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(hosts: Hosts, rank: int) -> Relays:
        """The hops of ``rank``."""
        ranks, own_host = range(len(hosts.ranks)), hosts.of_rank[rank]
        relays = hosts.relays_of(rank)
        members = hosts.members(rank)
        # Whose blocks each member of this host receives for it, in the order of the sources.
        sources = {
            member: [source for source in ranks if hosts.relays_of(source)[own_host] == member]
            for member in members
        }
        blocks_for = [
            hosts.groups[hosts.of_rank[peer]] if relays[hosts.of_rank[peer]] == peer else () for peer in ranks
        ]
        between = _RelayHop(
            level="between hosts, padded",
            order=tuple(block for blocks in blocks_for for block in blocks),
            sent=tuple(map(len, blocks_for)),
            received=tuple(len(members) if peer in sources[rank] else 0 for peer in ranks),
        )
        # This rank now has, of each of its sources, a block for each member.
        own = len(sources[rank])
        inside = _RelayHop(
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

    def exchange(self, blocks: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """Send ``blocks``, one for each rank, by the all-to-all ``exchange``; return the block of each rank."""
        for hop in self.hops:
            blocks = exchange(_reorder(blocks, hop.order), hop.sent, hop.received, hop.level)
        return _reorder(blocks, self.order)


def _reorder(blocks: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    # Not an index on the device, whose copy from the host a CUDA graph cannot capture.
    return torch.stack([blocks[number] for number in order]) if order else blocks[:0]
