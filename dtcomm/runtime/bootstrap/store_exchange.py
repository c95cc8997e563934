"""How the ranks of a group find each other: an exchange through the group's own store.

Nothing is sent through the group itself, so a communicator can be made between any two of the user's
collectives.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from dtcomm import env
from dtcomm.errors import CollectiveMismatch, CollectiveTimeout


def host_id() -> str:
    """Equal for processes that can share memory as far as names tell; ``attach`` finds out."""
    chosen = env.get("DTCOMM_HOST_ID")
    if chosen:
        return chosen
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux, or no /proc
        return f"{socket.gethostname()}/{os.getpid()}"


class StoreExchange:
    """One exchange of words among the ranks of a group; each round is one JSON object a rank.

    ``rank`` counts among those that meet; ``names`` are their global ranks.
    """

    def __init__(
        self, store: Store, prefix: str, rank: int, names: Sequence[int], timeout: timedelta
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._names = names
        self._ranks = len(names)
        self._timeout = timeout
        self._rounds: list[str] = []

    def exchange(self, word: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's word, in rank order. CollectiveTimeout names the ranks that did not come."""
        prefix = f"{self._prefix}/{len(self._rounds)}"
        self._rounds.append(prefix)
        self._store.set(f"{prefix}/{self._rank}", json.dumps(word))
        words = []
        for rank in range(self._ranks):
            key = f"{prefix}/{rank}"
            try:
                self._store.wait([key], self._timeout)
            except RuntimeError as error:
                raise CollectiveTimeout(
                    f"rank {self._names[rank]} did not come to make a communicator before the timeout of "
                    f"{self._timeout.total_seconds():g} s: every rank of the group has to call"
                ) from error
            words.append(json.loads(self._store.get(key)))
        return words

    def close(self) -> None:
        """The last rank to leave takes the words away."""
        if self._store.add(f"{self._prefix}/left", 1) < self._ranks:
            return
        for prefix in self._rounds:
            for rank in range(self._ranks):
                self._store.delete_key(f"{prefix}/{rank}")


def require_equal(words: list[dict[str, Any]], key: str, what: str) -> None:
    """CollectiveMismatch that names who said what where ranks differ in ``key``."""
    said = [json.dumps(word[key], sort_keys=True) for word in words]
    if len(set(said)) > 1:
        listing = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(said))
        raise CollectiveMismatch(f"ranks disagree on {what}: {listing}")
