"""Counters of what experts' rows send, and their report."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
import torch.distributed as dist

from dtcomm.compress.report import Report, Reporting
from dtcomm.compress.traffic import Traffic, group_traffic, message_rows
from dtcomm.work import Work

_Key = tuple[str, str, str, str]  # level, what, codec, dtype


class State(Reporting):
    """Counts what experts' rows send over a process group on this rank, from now on; ``str()`` gives one line.

    Forward and backward passes of `dispatch`, `combine`, their padded forms and `MoE` are counted.

    Args:
        group: Process group. Default: all ranks.

    Example::

        state = dtcomm.moe.State()
        train(model)  # has layers of dtcomm.moe.MoE
        state.print_report()
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group_name = group_name(group)
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._traffic: dict[_Key, Traffic] = {}
        _states.add(self)

    def count(self, key: _Key, numel: int, plain_bytes: int, work: Work) -> None:
        """Add one all-to-all; `record` calls it."""
        _, what, codec, dtype = key
        traffic = self._traffic.setdefault(key, Traffic(codec=codec, what=what, dtype=dtype))
        traffic.numel += numel
        traffic.add(work, plain_bytes)

    def report(self) -> Report:
        """Return what was sent on this rank since the state was made. Nothing is communicated.

        Returns:
            A row for tokens, outputs, weights and gradients, each with its codec. Bytes are those that this rank sent;
            those of rows for itself are none.
        """
        counted = [(key[0], replace(traffic)) for key, traffic in self._traffic.items()]
        rows = group_traffic(counted)
        seconds = [traffic.seconds for _, traffic in counted]
        return Report(
            integration="experts",
            rank=self._rank,
            world_size=self._ranks,
            policy=str(self),
            feedback=False,
            steps=None,
            messages=sum(row.calls for row in rows),
            wire_bytes=sum(row.wire_bytes for row in rows),
            plain_bytes=sum(row.plain_bytes for row in rows),
            seconds=None if None in seconds else sum(filter(None, seconds)),
            residual_bytes=0,
            rows=rows,
            by_message=message_rows(counted),
        )

    def __str__(self) -> str:
        parts = {f"{traffic.what} {traffic.codec}" for traffic in self._traffic.values()}
        return ", ".join(sorted(parts)) or "nothing sent yet"


_states: weakref.WeakSet[State] = weakref.WeakSet()


def group_name(group: dist.ProcessGroup | None) -> str:
    """Return the name of a group; None is the default group."""
    named = dist.group.WORLD if group is None else group
    if named is None:
        raise RuntimeError(
            "group: no process group is initialized; call torch.distributed.init_process_group"
        )
    name: str = named.group_name
    return name


def record(
    group: dist.ProcessGroup | None,
    level: str,
    what: str,
    codec: str,
    dtype: torch.dtype,
    numel: int,
    work: Work,
) -> None:
    """Count a completed all-to-all in every state of its group.

    Args:
        group: The group.
        level: Between which ranks it was.
        what: What was sent, such as ``"tokens"``.
        codec: The codec.
        dtype: The dtype in which it would travel uncompressed.
        numel: Elements that this rank sent to others.
        work: The handle.
    """
    if not _states:
        return
    name, key = group_name(group), (level, what, codec, str(dtype).removeprefix("torch."))
    for state in list(_states):
        if state.group_name == name:
            state.count(key, numel, numel * dtype.itemsize, work)
