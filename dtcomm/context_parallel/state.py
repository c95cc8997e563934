"""Counters of what context-parallel attention sends, and their report."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
import torch.distributed as dist

from dtcomm.compress.report import Report, Reporting
from dtcomm.compress.traffic import Traffic, group_traffic, message_rows
from dtcomm.context_parallel.layout import GroupOrMesh, process_group_of
from dtcomm.context_parallel.settings import Settings
from dtcomm.work import Work

_Key = tuple[str, str, str, str]  # method, what, codec, dtype


class State(Reporting):
    """Counts what attention over a process group sends on this rank, from now on; ``str()`` gives one line.

    `dtcomm.context_parallel.context_parallel` makes one; for calls of `attention` make it yourself. Compiled code and
    backward passes are counted too.

    Args:
        group: Process group, or a device mesh with one dimension. Default: all ranks.

    Raises:
        ValueError: The mesh has more than one dimension.

    Example::

        state = dtcomm.context_parallel.State()
        train(model)  # calls dtcomm.context_parallel.attention
        state.print_report()
    """

    def __init__(self, group: GroupOrMesh = None) -> None:
        process_group = process_group_of(group)
        named = dist.group.WORLD if process_group is None else process_group
        if named is None:
            raise RuntimeError(
                "group: no process group is initialized; call torch.distributed.init_process_group"
            )
        self.group_name: str = named.group_name
        self._rank, self._ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._traffic: dict[_Key, Traffic] = {}
        _states.add(self)

    def count(self, key: _Key, numel: int, plain_bytes: int, work: Work) -> None:
        """Add one message or collective; `record` calls it."""
        _, what, codec, dtype = key
        traffic = self._traffic.setdefault(key, Traffic(codec=codec, what=what, dtype=dtype))
        traffic.numel += numel
        traffic.add(work, plain_bytes)

    def report(self) -> Report:
        """Return what was sent on this rank since the state was made. Nothing is communicated.

        Returns:
            A row for keys and values, queries and outputs, and gradients, each with its codec; bytes are those that
            this rank sent.
        """
        counted = [(key[0], replace(traffic)) for key, traffic in self._traffic.items()]
        rows = group_traffic(counted)
        seconds = [traffic.seconds for _, traffic in counted]
        return Report(
            integration="context parallel",
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
        methods = {key[0] for key in self._traffic}
        if not parts:
            return "nothing sent yet"
        return f"{', '.join(sorted(methods))}: {', '.join(sorted(parts))}"


_states: weakref.WeakSet[State] = weakref.WeakSet()


def record(settings: Settings, what: str, codec: str, dtype: torch.dtype, numel: int, work: Work) -> None:
    """Count a completed operation in every state of its group.

    Args:
        settings: The settings of the call.
        what: What was sent, such as ``"keys and values"``.
        codec: The codec.
        dtype: The dtype in which it would travel uncompressed.
        numel: Elements that this rank sent.
        work: The handle.
    """
    key = (settings.method, what, codec, str(dtype).removeprefix("torch."))
    for state in list(_states):
        if state.group_name == settings.group_name:
            state.count(key, numel, numel * dtype.itemsize, work)
