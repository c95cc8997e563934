"""What a collective is expected to cost, read off its schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dtcomm.codecs.base import Codec
from dtcomm.planner.topology import Topology
from dtcomm.schedule.ir import Schedule
from dtcomm.schedule.simulate import Link, Work, simulate


@dataclass(frozen=True, kw_only=True)
class Table:
    """The constants that ``auto`` decides by. All ranks of a group must use the same.

    ``one_shot_bytes``: the most bytes that a rank may send in one shot (payload times peers) before two shots
    are taken; higher saves a synchronisation, lower saves arithmetic, which one shot repeats on every rank.
    ``inside`` and ``between`` are the links within a host and between hosts: alpha is ``latency``, 1/beta
    ``bandwidth``. ``work`` is gamma: encoding and decoding, in seconds an element.
    """

    one_shot_bytes: int = 128 * 1024
    inside: Link = field(default=Link(latency=5e-7, bandwidth=1e10))
    between: Link = field(default=Link(latency=2e-5, bandwidth=1.25e9, overhead=2e-6))
    work: Work = field(default=Work(encode=2.5e-10, decode=2.5e-10))

    def __post_init__(self) -> None:
        if self.one_shot_bytes < 0:
            raise ValueError(f"one_shot_bytes: must be at least 0, got {self.one_shot_bytes}")


def predict(
    schedule: Schedule, numel: int, dtype: torch.dtype, codec: Codec, topology: Topology, table: Table
) -> float:
    """Seconds of one pass over ``schedule``; ``numel`` counts the whole tensor (``Schedule.bytes_on_wire``).

    An upper bound for large tensors, whose pieces overlap: it serves to compare algorithms, not to promise
    times.
    """
    if topology.ranks != schedule.ranks:
        raise ValueError(f"topology: has {topology.ranks} ranks, the schedule {schedule.ranks}")
    links = (table.inside, table.between)
    return simulate(schedule, numel, codec, links, table.work, dtype, topology.level).seconds
