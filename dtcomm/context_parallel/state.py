"""Counters of what context-parallel attention sends, and their report."""

from __future__ import annotations

import torch

from dtcomm.compress.report import GroupTraffic
from dtcomm.context_parallel.layout import GroupOrMesh, process_group_of
from dtcomm.context_parallel.settings import Settings
from dtcomm.work import Work


class State(GroupTraffic):
    """Counts what attention over a process group sends on this rank, from now on; ``str()`` gives one line.

    `dtcomm.context_parallel.context_parallel` makes one; for calls of `attention` make it yourself. Compiled code and
    backward passes are counted too.

    Args:
        group: Process group, or a device mesh with one dimension. Default: all ranks.

    Raises:
        ValueError: The mesh has more than one dimension.
        RuntimeError: No process group is initialized.

    Example::

        state = dtcomm.context_parallel.State()
        train(model)  # calls dtcomm.context_parallel.attention
        state.print_report()
    """

    integration = "context parallel"

    def __init__(self, group: GroupOrMesh = None) -> None:
        super().__init__(process_group_of(group))

    def __str__(self) -> str:
        methods = {key[0] for key in self._traffic}
        return f"{', '.join(sorted(methods))}: {super().__str__()}" if methods else super().__str__()


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
    State.record(settings.group_name, settings.method, what, codec, dtype, numel, work)
