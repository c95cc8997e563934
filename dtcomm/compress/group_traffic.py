"""Counters of what an integration sends over one process group, and their report."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist

from dtcomm.compress.report import Report, Reporting
from dtcomm.compress.traffic import Traffic, group_traffic, message_rows, total_seconds
from dtcomm.work import Work

Key = tuple[str, str, str, str]  # name of the message, what, codec, dtype


class GroupTraffic(Reporting):
    """Counts what an integration sends over a process group on this rank, from now on; ``str()`` gives one line.

    A subclass is one integration. Its operations call `record`, which counts in all of the subclass's objects for the
    group.

    Args:
        group: Process group. None is the default group.

    Raises:
        RuntimeError: No process group is initialized.
    """

    integration: ClassVar[str]
    _live: ClassVar[weakref.WeakSet[GroupTraffic]]

    def __init_subclass__(cls) -> None:
        cls._live = weakref.WeakSet()

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group_name = group_name(group)
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._traffic: dict[Key, Traffic] = {}
        self._live.add(self)

    @classmethod
    def is_counting(cls) -> bool:
        """Return whether there is an object that counts."""
        return len(cls._live) > 0

    @classmethod
    def record(
        cls,
        group_name: str,
        message: str,
        what: str,
        codec: str,
        dtype: torch.dtype,
        numel: int,
        work: Work,
    ) -> None:
        """Count a completed operation in every object of its group.

        Args:
            group_name: The name of the group.
            message: The name of the message in reports.
            what: What was sent, such as ``"tokens"``.
            codec: The codec.
            dtype: The dtype in which it would travel uncompressed.
            numel: Elements that this rank sent.
            work: The handle.
        """
        key = (message, what, codec, str(dtype).removeprefix("torch."))
        for state in list(cls._live):
            if state.group_name == group_name:
                traffic = state._traffic.setdefault(key, Traffic(codec=codec, what=what, dtype=key[3]))
                traffic.numel += numel
                traffic.add(work, numel * dtype.itemsize)

    def report(self) -> Report:
        """Return what was sent on this rank since the state was made. Nothing is communicated.

        Returns:
            A row for each kind of message, with its codec. Bytes are those that this rank sent; what it sends to itself
            does not count.
        """
        counted = [(key[0], replace(traffic)) for key, traffic in self._traffic.items()]
        rows = group_traffic(counted)
        return Report(
            integration=self.integration,
            rank=self._rank,
            world_size=self._ranks,
            policy=str(self),
            feedback=False,
            steps=None,
            messages=sum(row.calls for row in rows),
            wire_bytes=sum(row.wire_bytes for row in rows),
            plain_bytes=sum(row.plain_bytes for row in rows),
            seconds=total_seconds(traffic.seconds for _, traffic in counted),
            residual_bytes=0,
            rows=rows,
            by_message=message_rows(counted),
        )

    def __str__(self) -> str:
        parts = {f"{traffic.what} {traffic.codec}" for traffic in self._traffic.values()}
        return ", ".join(sorted(parts)) or "nothing sent yet"


def group_name(group: dist.ProcessGroup | None) -> str:
    """Return the name of a group; None is the default group.

    Raises:
        RuntimeError: No process group is initialized.
    """
    named = dist.group.WORLD if group is None else group
    if named is None:
        raise RuntimeError(
            "group: no process group is initialized; call torch.distributed.init_process_group"
        )
    name: str = named.group_name
    return name
