"""Encoding and decoding speed of one core or of a GPU.

A core is timed by the thread's CPU clock. A GPU is timed by CUDA events around replays of a graph that uses several
sets of buffers, so that neither launch latency nor caches are measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dtcomm.cli.codecs.error import KEY
from dtcomm.codecs import Codec
from dtcomm.kernels.ops import decode, encode
from dtcomm.measure.device_clock import Clock, make_clock, median_seconds
from dtcomm.measure.kernel_workloads import KernelWorkload, KernelWorkloads, buffer_sets_for
from dtcomm.measure.memory_floor import TimedCopy

#: Seconds for encoding and for decoding, unless the fewest calls take longer.
SECONDS = 0.03
FEWEST_CALLS = 3
REPLAYS = 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed in GB/s (1e9 bytes) of fp32 data.

    ``of_floor`` has, for each GPU workload, the time of a device copy of the bytes it must move over its own time.
    """

    encode: float
    decode: float
    of_floor: dict[str, float] = field(default_factory=dict)


class OnDevice:
    """Measures the speed of a device; tests set ``clock`` and the bytes ``copied`` by the memory-floor copy."""

    def __init__(
        self, device: torch.device, clock: Clock | None = None, copied: int = TimedCopy.LARGE
    ) -> None:
        self._device, self._clock = device, clock or make_clock(device)
        self._copy = TimedCopy(device, self._clock, copied)

    def measure(self, codec: Codec, size: int) -> Speed | str:
        """Return the median speed for ``size`` bytes of fp32, or why the device has no kernel for the codec."""
        numel = max(1, size // 4)
        try:
            workloads = KernelWorkloads(codec, numel, buffer_sets_for(numel), self._device)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return str(error)
        rates, shares = {}, {}
        for workload in (workloads.encode(), workloads.decode(), *workloads.reductions()):
            seconds = self._seconds(workload, workloads.sets)
            rates[workload.name] = 4 * numel / seconds / 1e9
            self._copy.time(REPLAYS)
            shares[workload.name] = workload.bytes_moved / self._copy.bytes_per_second(reset=True) / seconds
        return Speed(encode=rates["encode"], decode=rates["decode"], of_floor=shares)

    def _seconds(self, workload: KernelWorkload, sets: int) -> float:
        def all_sets() -> None:
            for turn in range(sets):
                workload.run(turn)

        replay = self._clock.graph(all_sets, 1)
        return max(median_seconds(self._clock, replay, REPLAYS, sets, queued_before=replay), 1e-9)


def measure(codec: Codec, size: int, seconds: float = SECONDS) -> Speed:
    """Return the median speed for ``size`` bytes of fp32 in reused buffers."""
    x = torch.randn(max(1, size // 4), generator=torch.Generator().manual_seed(0))
    payload = encode(codec, x, key=KEY)
    out = torch.empty_like(x)
    bytes_ = x.numel() * 4
    return Speed(
        encode=bytes_ / _median(lambda: encode(codec, x, key=KEY, out=payload), seconds) / 1e9,
        decode=bytes_ / _median(lambda: decode(codec, payload, x.numel(), out=out), seconds) / 1e9,
    )


def _median(call: Callable[[], object], seconds: float) -> float:
    """Return the median CPU seconds of one call, which exclude other threads on this core."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < FEWEST_CALLS or time.perf_counter() < end:
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return max(statistics.median(times), 1e-9)
