"""Properties of torch.distributed groups: whether one is usable, its store, timeout, deadline and ranks."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import torch_compat
from dtcomm.errors import CommunicatorClosed, DtcommError

_STORE_CONNECT_SECONDS = 30.0

inherited: set[int] = set()
"""Ids of the groups that a forked child inherited from its parent and cannot use."""


def require_group(group: Any) -> dist.ProcessGroup:
    """The group to use; None is the default group.

    ValueError if torch.distributed is not initialised, the group is destroyed, or this process is not in it; TypeError
    if it is not a process group; DtcommError in a forked child of the process that made the group.
    """
    group = torch_compat.default_group() if group is None else group
    if group is None:
        raise ValueError(
            "group: torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    if id(group) in inherited:
        raise DtcommError(
            "group: this process was forked from one that uses dtcomm; communicators do not survive a fork: "
            "start ranks with torchrun or multiprocessing's spawn"
        )
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"group: rank {dist.get_rank()} is not in this group")
        raise TypeError(f"group: expected a ProcessGroup or None, got {type(group).__name__}")
    if group not in torch_compat.all_groups():
        raise ValueError("group: this process group has been destroyed")
    return group


def position(ranks: Sequence[int], global_rank: int, argument: str) -> int:
    """The position of a global rank in ``ranks``; ValueError that lists them if it is not there."""
    try:
        return ranks.index(global_rank)
    except ValueError:
        listing = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
        raise ValueError(
            f"{argument}: rank {global_rank} is not in the group; its ranks are {listing}"
        ) from None


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the group was made with, or torch's default."""
    timeout = getattr(group, "timeout", None)  # a group of the dtcomm backend has one
    if isinstance(timeout, timedelta):
        return timeout
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except RuntimeError:  # no backend for this device
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return dist.default_pg_timeout


class Deadline:
    """The end of a call that may wait ``timeout`` from now on.

    ``cancelled`` says why another thread no longer wants the result of the call; empty as long as it does.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()
        self.cancelled = ""
        self._kind: type[DtcommError] = CommunicatorClosed
        self._end = time.monotonic() + self.timeout_s

    def left_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def cancel(self, reason: str, kind: type[DtcommError] = CommunicatorClosed) -> None:
        """End the call now, with an error of this kind."""
        self._kind = kind
        self._end, self.cancelled = 0.0, reason

    def require_wanted(self) -> None:
        """CommunicatorClosed, or what `cancel` was given, if another thread no longer wants the call's result."""
        if self.cancelled:
            raise self._kind(self.cancelled)


def group_store(group: dist.ProcessGroup) -> c10d.Store:
    """The store through which the group's ranks found each other."""
    store: c10d.Store = torch_compat.all_groups()[group][1]
    return store


def server_address(store: Any) -> tuple[str, int] | None:
    """The host and port of a TCPStore, also within stores that put a prefix before keys; None for other stores."""
    server = _without_prefix(store)
    return (server.host, server.port) if isinstance(server, dist.TCPStore) else None  # type: ignore[attr-defined]


def _without_prefix(store: Any) -> Any:
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def private_store(group: dist.ProcessGroup) -> c10d.Store:
    """The group's store through a connection of its own, where the store has connections.

    A wait on a shared TCPStore blocks every other thread that uses it, whatever group it serves. Waits on the new
    connection end at the group's timeout; the store's own, of five minutes, would keep a thread that has been given up.
    DtcommError if the store cannot be reached.
    """
    store = group_store(group)
    address = server_address(store)
    with contextlib.ExitStack() as probe:
        if address is not None:  # the clone of a TCPStore retries for minutes where it cannot connect
            try:
                probe.enter_context(socket.create_connection(address, _STORE_CONNECT_SECONDS))
            except OSError as error:
                raise DtcommError(
                    f"the group's store at {address[0]}:{address[1]} cannot be reached: {error}"
                ) from error
        try:
            clone: c10d.Store = store.clone()  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):  # a store of the user's own
            return store
        if isinstance(_without_prefix(store), dist.TCPStore | dist.FileStore):  # type: ignore[attr-defined]
            clone.set_timeout(group_timeout(group))  # the clones of others are the store itself
        return clone
