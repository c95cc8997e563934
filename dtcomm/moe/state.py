"""Counters of what experts' rows send, and their report."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtcomm.compress.report import GroupTraffic, group_name
from dtcomm.work import Work


class State(GroupTraffic):
    """Counts what experts' rows send over a process group on this rank, from now on; ``str()`` gives one line.

    Forward and backward passes of `dispatch`, `combine`, their padded forms and `MoE` are counted.

    Args:
        group: Process group. Default: all ranks.

    Raises:
        RuntimeError: No process group is initialized.

    Example::

        state = dtcomm.moe.State()
        train(model)  # has layers of dtcomm.moe.MoE
        state.print_report()
    """

    integration = "experts"


def record(
    group: dist.ProcessGroup | None,
    level: str,
    what: str,
    codec: str,
    dtype: torch.dtype,
    numel: int,
    work: Work,
) -> None:
    """Count a completed all-to-all; ``level`` says between which ranks it was, the rest is as of `State.record`."""
    if State.is_counting():
        State.record(group_name(group), level, what, codec, dtype, numel, work)
