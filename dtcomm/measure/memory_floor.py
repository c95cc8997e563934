"""The memory floor of a kernel: the time a device copy takes for the bytes the kernel must read and write."""

from __future__ import annotations

import statistics
from typing import ClassVar

import torch

from dtcomm.measure.device_clock import Clock, time_calls


def minimum_bytes_moved(
    collective: str, algorithm: str, ranks: int, numel: int, itemsize: int, wire: int
) -> int | None:
    """Return the bytes that all virtual ranks of a fused collective read and write at least.

    Args:
        collective: Name of the collective.
        algorithm: Name of the algorithm.
        ranks: Number of ranks that share the device.
        numel: Elements of the tensor (all_reduce) or of one shard (all other collectives).
        itemsize: Bytes of an element.
        wire: Bytes of the encoded payload of ``numel`` elements.

    Returns:
        Bytes, or None if the pair of collective and algorithm is not known. A payload that a rank keeps for itself
        counts only where the algorithm writes it.
    """
    tensor = numel * itemsize
    match collective, algorithm:
        case (
            "all_reduce",
            "one_shot",
        ):  # each payload is written to all slots, including the own one, and read
            per_rank = 2 * tensor + 2 * ranks * wire
        case "all_reduce", "two_shot":
            # The other ranks' chunk payloads are written and read, then the sum's: written to all and read by all.
            per_rank = 2 * tensor + 4 * ((ranks - 1) * wire // ranks) + 2 * (wire // ranks)
        case "reduce_scatter", "one_shot":  # a rank's contribution to its own shard is not encoded
            per_rank = (ranks + 1) * tensor + 2 * (ranks - 1) * wire
        case (
            "all_gather",
            "one_shot",
        ):  # each payload is written to all slots, including the own one, and decoded
            per_rank = (1 + ranks) * tensor + 2 * ranks * wire
        case "all_to_all", "one_shot":  # a rank's own shard is copied
            per_rank = 2 * ranks * tensor + 2 * (ranks - 1) * wire
        case _:
            return None
    return ranks * per_rank


class TimedCopy:
    """A copy of ``nbytes`` that is timed repeatedly between other measurements, since device clocks drift."""

    LARGE: ClassVar[int] = 1 << 30  # larger than any cache

    def __init__(self, device: torch.device, clock: Clock, nbytes: int = LARGE) -> None:
        self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._clock = clock
        self._times: list[float] = []
        self.run()  # untimed: the first copy touches cold pages
        clock.synchronize()

    def time(self, repeats: int = 1) -> None:
        """Time the copy ``repeats`` more times."""
        self._times += [time_calls(self._clock, self.run, queued_before=self.run) for _ in range(repeats)]

    def bytes_per_second(self, reset: bool = False) -> float:
        """Return the median of bytes read and written per second since the start or the last reset."""
        rate = 2 * self._buffers[0].nbytes / max(statistics.median(self._times), 1e-12)
        if reset:
            self._times = []
        return rate

    def run(self) -> None:
        """Queue the copy once."""
        self._buffers[1].copy_(self._buffers[0])
