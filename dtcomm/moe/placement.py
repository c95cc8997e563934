"""Where ranks are and how many rows go where: hosts, and the tables of counts that ranks exchange."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dtcomm.collectives import all_gather
from dtcomm.collectives.groups import host_groups
from dtcomm.errors import CollectiveMismatch
from dtcomm.moe import agreement
from dtcomm.moe.hops import constant, unique_destinations


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
    def of(x: torch.Tensor, group: dist.ProcessGroup | None) -> Hosts:
        """The hosts of a group, for calls with tensors on the device of ``x``."""
        return _hosts(host_groups(x, group))

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

        Args:
            experts: int64 [tokens, choices]; -1 is none.
            local_experts: Number of experts of a rank.
            rank: The rank.
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


@functools.lru_cache(maxsize=64)
def _hosts(groups: tuple[tuple[int, ...], ...]) -> Hosts:
    ranks = tuple(rank for members in groups for rank in members)
    of_position = tuple(host for host, members in enumerate(groups) for _ in members)
    position = tuple(ranks.index(rank) for rank in range(len(ranks)))
    return Hosts(
        groups=groups,
        ranks=ranks,
        position=position,
        of_rank=tuple(of_position[place] for place in position),
        of_position=of_position,
    )


class Counts:
    """How many rows go where, from the tables of all ranks.

    Args:
        lists: The table of each rank: header, counts of experts, of ranks by position, and of hosts.
        num_experts: Number of experts.
        world_size: Number of ranks.
        hosts: The hosts.
    """

    def __init__(self, lists: list[list[int]], num_experts: int, world_size: int, hosts: Hosts) -> None:
        begin = agreement.HEADER
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
        raise agreement.mismatch(num_experts, error) from None
    lists: list[list[int]] = gathered.tolist()
    return lists
