"""Announcements through a group's store, by which ranks see who has reached a point of the program without waiting."""

from __future__ import annotations

import torch.distributed as dist

from dtcomm.runtime.bootstrap.store_exchange import name_ranks
from dtcomm.runtime.process_groups import group_store


class Announcement:
    """Says that this rank has reached a point of the program, and sees which ranks have.

    Args:
        group: The ranks that are expected to reach it.
        name: The name of the point. The nth announcement of a rank under a name belongs to the nth of every other rank.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._store = group_store(group)
        self._ranks = dist.get_process_group_ranks(group)
        counter = f"dtcomm/announced/{name}/{dist.get_rank(group)}"
        number = self._store.add(counter, 1)
        self._keys = [f"dtcomm/announced/{name}/{rank}/{number}" for rank in range(len(self._ranks))]
        self._store.set(f"{counter}/{number}", "")

    def missing(self) -> str:
        """Return the global ranks that have not reached the point yet, as text; empty if all have."""
        if self._store.check(self._keys):
            return ""
        # Ranks may arrive between the two looks.
        missing = [
            rank for rank, key in zip(self._ranks, self._keys, strict=True) if not self._store.check([key])
        ]
        return name_ranks(missing) if missing else ""
