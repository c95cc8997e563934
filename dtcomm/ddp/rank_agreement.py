"""How a rank learns what the others found, and how fast the way to them is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from dtcomm import env
from dtcomm.collectives import all_reduce, info
from dtcomm.compress.autotune_model import cpu_oversubscribed
from dtcomm.device.streams import streams_of

PROBES = [1 << at for at in (16, 18, 20, 22)]  # bytes
ENOUGH = 0.02  # seconds, after which no larger one is sent


class Consensus(Protocol):
    """How a rank learns what the others found; calls are made on all ranks in the same order."""

    ranks: int
    device: torch.device | None  # where gradients are, if not on the CPU

    def agree(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, one by one."""

    def probe(self) -> tuple[float, float]:
        """Seconds of a message of next to nothing, and of a byte of a large one that a rank sends."""

    def cpu_oversubscribed(self) -> bool:
        """Whether this rank has no core besides the one that computes."""

    def in_memory(self) -> bool:
        """Whether all ranks share one host's memory."""

    def emulated(self) -> bool:
        """Whether DTCOMM_LINK slows our own messages, and so the group's backend tells nothing of the link."""


class ProcessGroupConsensus:
    """`Consensus` over a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.device: torch.device | None = None
        self.ranks = dist.get_world_size(group)

    def agree(self, values: Sequence[float]) -> list[float]:
        said = torch.tensor(values, dtype=torch.float64)
        all_reduce(said, "max", group=self._group)
        found: list[float] = said.tolist()
        return found

    def probe(self) -> tuple[float, float]:
        latency = min(self._timed(64, 8))
        per_byte = 0.0
        for size in PROBES:
            took = self.agree([min(self._timed(size // 4, 2))])[0]
            share = 2 * (self.ranks - 1) / self.ranks
            per_byte = max(0.0, took - latency) / (share * size)
            if took > ENOUGH:
                break
        return latency, per_byte

    def cpu_oversubscribed(self) -> bool:
        return self.device is None and cpu_oversubscribed(
            self.ranks // max(1, int(info(self._group)["hosts"]))
        )

    def in_memory(self) -> bool:
        if self.device is not None:  # what is between devices is no memory of the host
            return False
        how = info(self._group)
        return not self.emulated() and how["runtime"] == "native" and how["hosts"] == 1

    def emulated(self) -> bool:
        return bool(env.get("DTCOMM_LINK"))

    def _timed(self, elements: int, calls: int) -> list[float]:
        tensor = torch.zeros(elements, device=self.device)
        streams = streams_of(tensor.device)
        all_reduce(tensor, group=self._group)  # brings the ranks together
        marks = [streams.mark()]
        for _ in range(calls):
            all_reduce(tensor, group=self._group)
            marks.append(streams.mark())
        if self.device is not None and not streams.query(marks[-1]):
            streams.synchronize(marks[-1])
        return [streams.elapsed(*pair) for pair in pairwise(marks)]
