"""Which rank is on which host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dtcomm.schedule.ir import Transfer


@dataclass(frozen=True)
class Topology:
    """``host_of[rank]`` numbers the hosts in the order of their first ranks."""

    host_of: tuple[int, ...]

    def __post_init__(self) -> None:
        seen = 0
        for rank, host in enumerate(self.host_of):
            if not 0 <= host <= seen:
                raise ValueError(f"host_of: rank {rank} is on host {host}, but only {seen} came before it")
            seen = max(seen, host + 1)
        if not self.host_of:
            raise ValueError("host_of: at least one rank is needed")

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Topology:
        """From each rank's host name (or whatever identifies its host)."""
        numbers: dict[Hashable, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @classmethod
    def even(cls, ranks: int, hosts: int = 1) -> Topology:
        """``ranks`` ranks spread over ``hosts`` hosts in blocks of almost equal size."""
        if not 1 <= hosts <= ranks:
            raise ValueError(f"hosts: must be 1..{ranks} for {ranks} ranks, got {hosts}")
        return cls(tuple(rank * hosts // ranks for rank in range(ranks)))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.host_of)

    @property
    def hosts(self) -> int:
        """How many hosts they are on."""
        return max(self.host_of) + 1

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on each host."""
        return tuple(
            tuple(rank for rank, at in enumerate(self.host_of) if at == host) for host in range(self.hosts)
        )

    def level(self, transfer: Transfer) -> int:
        """0 inside a host, 1 between hosts."""
        return int(self.host_of[transfer.src] != self.host_of[transfer.dst])
