"""Agreement between ranks for the autotuner: the largest of all ranks' measurements, and probes of the link."""

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

PROBE_BYTES = [1 << exponent for exponent in (16, 18, 20, 22)]
MAX_PROBE_SECONDS = 0.02  # after a probe that takes longer no larger one is sent


class Consensus(Protocol):
    """What the autotuner asks about all ranks; calls are made on all ranks in the same order.

    Attributes:
        ranks: The number of ranks.
        device: The device of the gradients; None for the CPU.
    """

    ranks: int
    device: torch.device | None

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, element by element."""

    def probe(self) -> tuple[float, float]:
        """Return the seconds of a tiny message, and the seconds for each byte that a rank sends in a large one."""

    def cpu_oversubscribed(self) -> bool:
        """Return whether this rank has no core besides the one that computes."""

    def in_memory(self) -> bool:
        """Return whether all ranks share one host's memory."""

    def emulated(self) -> bool:
        """Return whether DTCOMM_LINK slows our messages; the group's own backend then says nothing of the link."""


class ProcessGroupConsensus:
    """`Consensus` over a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.device: torch.device | None = None
        self.ranks = dist.get_world_size(group)

    def max(self, values: Sequence[float]) -> list[float]:
        """See `Consensus.max`."""
        tensor = torch.tensor(values, dtype=torch.float64)
        all_reduce(tensor, "max", group=self._group)
        largest: list[float] = tensor.tolist()
        return largest

    def probe(self) -> tuple[float, float]:
        """See `Consensus.probe`."""
        latency = min(self._time_all_reduces(64, 8))
        per_byte = 0.0
        for size in PROBE_BYTES:
            seconds = self.max([min(self._time_all_reduces(size // 4, 2))])[0]
            bytes_sent = 2 * (self.ranks - 1) / self.ranks * size
            per_byte = max(0.0, seconds - latency) / bytes_sent
            if seconds > MAX_PROBE_SECONDS:
                break
        return latency, per_byte

    def cpu_oversubscribed(self) -> bool:
        """See `Consensus.cpu_oversubscribed`."""
        if self.device is not None:
            return False
        return cpu_oversubscribed(self.ranks // max(1, int(info(self._group)["hosts"])))

    def in_memory(self) -> bool:
        """See `Consensus.in_memory`."""
        if self.device is not None:  # the links between devices are not the host's memory
            return False
        transport = info(self._group)
        return not self.emulated() and transport["runtime"] == "native" and transport["hosts"] == 1

    def emulated(self) -> bool:
        """See `Consensus.emulated`."""
        return bool(env.get("DTCOMM_LINK"))

    def _time_all_reduces(self, elements: int, calls: int) -> list[float]:
        tensor = torch.zeros(elements, device=self.device)
        streams = streams_of(tensor.device)
        all_reduce(tensor, group=self._group)  # brings the ranks together
        marks = [streams.mark()]
        for _ in range(calls):
            all_reduce(tensor, group=self._group)
            marks.append(streams.mark())
        if not streams.query(marks[-1]):
            streams.synchronize(marks[-1])
        return [streams.elapsed(*pair) for pair in pairwise(marks)]
