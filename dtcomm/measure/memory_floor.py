"""The memory floor of what kernels do on one device: the bytes that they must read and write, over a timed copy."""

from __future__ import annotations

import statistics
from typing import ClassVar

import torch

from dtcomm.measure.device_clock import Clock, seconds_of


def moved_bytes(
    collective: str, algorithm: str, ranks: int, numel: int, itemsize: int, wire: int
) -> int | None:
    """What all virtual ranks of a fused collective read and write at the least; None of one that is not known here.

    ``numel`` elements of ``itemsize`` bytes are the tensor of an all_reduce, and one shard of the others; ``wire`` is
    its payload. Payloads that a rank keeps for itself are counted where the algorithm writes them.
    """
    tensor = numel * itemsize
    match collective, algorithm:
        case "all_reduce", "one_shot":  # written to all, own slot included, and all read
            each = 2 * tensor + 2 * ranks * wire
        case "all_reduce", "two_shot":
            # Payloads of the others' chunks written and read, then the sum's: written to all, read by all.
            each = 2 * tensor + 4 * ((ranks - 1) * wire // ranks) + 2 * (wire // ranks)
        case "reduce_scatter", "one_shot":  # what a rank has for itself is not encoded
            each = (ranks + 1) * tensor + 2 * (ranks - 1) * wire
        case "all_gather", "one_shot":  # written to all, own slot included, and all decoded
            each = (1 + ranks) * tensor + 2 * ranks * wire
        case "all_to_all", "one_shot":  # what a rank has for itself is copied
            each = 2 * ranks * tensor + 2 * (ranks - 1) * wire
        case _:
            return None
    return ranks * each


class Copy:
    """A copy of ``nbytes``, timed again and again beside what is compared with it, since a device's clocks move."""

    LARGE: ClassVar[int] = 1 << 30  # more than any cache holds

    def __init__(self, device: torch.device, clock: Clock, nbytes: int = LARGE) -> None:
        self._ends = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._clock = clock
        self._times: list[float] = []
        self.run()  # untimed: the first one finds cold pages
        clock.settle()

    def time(self, repeats: int = 1) -> None:
        """Time it once more, or several times."""
        self._times += [seconds_of(self._clock, self.run, ahead=self.run) for _ in range(repeats)]

    def rate(self, forget: bool = False) -> float:
        """Bytes read and written a second, in the median of what was timed since the start, or since forgetting."""
        rate = 2 * self._ends[0].nbytes / max(statistics.median(self._times), 1e-12)
        if forget:
            self._times = []
        return rate

    def run(self) -> None:
        """Queue it once."""
        self._ends[1].copy_(self._ends[0])
