"""How a rank learns what the others found, and how fast the way to them is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from dtcomm import env
from dtcomm.collectives import all_reduce, info
from dtcomm.compress.auto import crowded

PROBES = [1 << at for at in (16, 18, 20, 22)]  # bytes
ENOUGH = 0.02  # seconds, after which no larger one is sent


class Meet(Protocol):
    """How a rank learns what the others found; calls are made on all ranks in the same order."""

    ranks: int

    def agree(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, one by one."""

    def probe(self) -> tuple[float, float]:
        """Seconds of a message of next to nothing, and of a byte of a large one that a rank sends."""

    def crowded(self) -> bool:
        """Whether this rank has no core besides the one that computes."""

    def in_memory(self) -> bool:
        """Whether all ranks share one host's memory."""

    def emulated(self) -> bool:
        """Whether DTCOMM_LINK slows our own messages, and so the group's backend tells nothing of the link."""


class Group:
    """`Meet` over a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.ranks = dist.get_world_size(group)

    def agree(self, values: Sequence[float]) -> list[float]:
        said = torch.tensor(values, dtype=torch.float64)
        all_reduce(said, "max", group=self._group)
        found: list[float] = said.tolist()
        return found

    def probe(self) -> tuple[float, float]:
        latency = min(self._timed(torch.zeros(64), 8))
        per_byte = 0.0
        for size in PROBES:
            took = self.agree([min(self._timed(torch.zeros(size // 4), 2))])[0]
            share = 2 * (self.ranks - 1) / self.ranks
            per_byte = max(0.0, took - latency) / (share * size)
            if took > ENOUGH:
                break
        return latency, per_byte

    def crowded(self) -> bool:
        return crowded(self.ranks // max(1, int(info(self._group)["hosts"])))

    def in_memory(self) -> bool:
        how = info(self._group)
        return not self.emulated() and how["runtime"] == "native" and how["hosts"] == 1

    def emulated(self) -> bool:
        return bool(env.get("DTCOMM_LINK"))

    def _timed(self, tensor: torch.Tensor, calls: int) -> list[float]:
        all_reduce(tensor, group=self._group)  # brings the ranks together
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            all_reduce(tensor, group=self._group)
            times.append(time.perf_counter() - start)
        return times
