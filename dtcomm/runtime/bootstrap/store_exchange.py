"""Exchange of JSON objects between the ranks of a group, through the group's store.

Nothing is sent through the group itself, so a communicator can be made between any two of the user's collectives.
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

PROTOCOL = 2  # version of what ranks exchange and of the layout of shared memory


def host_id() -> str:
    """A string that is equal for processes that may share memory; mapping a peer's memory is the final test."""
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
    """A sequence of all-gathers of JSON objects between ranks.

    Args:
        store: The store that all ranks reach.
        prefix: Prefix of the keys, equal on all ranks and used by nothing else.
        rank: The position of this rank in ``global_ranks``.
        global_ranks: The global ranks that take part; errors name them.
        timeout: How long to wait for each rank.
    """

    def __init__(
        self, store: Store, prefix: str, rank: int, global_ranks: Sequence[int], timeout: timedelta
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._global_ranks = global_ranks
        self._ranks = len(global_ranks)
        self._timeout = timeout
        self._rounds: list[str] = []

    def all_gather(self, info: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's ``info``, in rank order. CollectiveTimeout names the first rank that did not come."""
        prefix = f"{self._prefix}/{len(self._rounds)}"
        self._rounds.append(prefix)
        self._store.set(f"{prefix}/{self._rank}", json.dumps(info))
        infos = []
        for rank in range(self._ranks):
            key = f"{prefix}/{rank}"
            try:
                self._store.wait([key], self._timeout)
            except RuntimeError as error:
                raise CollectiveTimeout(
                    f"rank {self._global_ranks[rank]} did not come to make a communicator before the timeout of "
                    f"{self._timeout.total_seconds():g} s: every rank of the group has to call"
                ) from error
            infos.append(json.loads(self._store.get(key)))
        return infos

    def require_same_operation(self, text: str, names: Sequence[str]) -> None:
        """Compare what the ranks are about to do, and close. All raise CollectiveMismatch if they differ.

        Args:
            text: What this rank does.
            names: How the error names each rank.
        """
        texts = [info["operation"] for info in self.all_gather({"operation": text})]
        self.close()
        if len(set(texts)) > 1:
            raise disagreement("what they do", dict(zip(names, texts, strict=True)))

    def close(self) -> None:
        """Leave the exchange; the last rank to leave deletes the keys."""
        if self._store.add(f"{self._prefix}/left", 1) < self._ranks:
            return
        for prefix in self._rounds:
            for rank in range(self._ranks):
                self._store.delete_key(f"{prefix}/{rank}")


def require_equal(infos: Sequence[Mapping[str, Any]], key: str, what: str) -> None:
    """CollectiveMismatch that lists every rank's value if ranks differ in ``key``."""
    values = [json.dumps(info[key], sort_keys=True) for info in infos]
    if len(set(values)) > 1:
        raise disagreement(what, {f"rank {rank}": value for rank, value in enumerate(values)})


def disagreement(what: str, values: Mapping[str, str]) -> CollectiveMismatch:
    """The error of ranks that differ in ``what``; ``values`` are by the name of the rank."""
    listing = "; ".join(f"{name}: {value}" for name, value in values.items())
    return CollectiveMismatch(f"ranks disagree on {what}: {listing}")
