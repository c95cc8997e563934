"""The clock: one operation, timed many times on all ranks together."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Powers of two that a normally distributed value may grow by before it overflows.
_ROOM = {torch.float16: 12, torch.bfloat16: 100, torch.float32: 100, torch.float64: 900}


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of the iterations' times, in seconds, each that of the slowest rank."""

    min: float
    max: float
    avg: float
    p50: float
    p95: float
    p99: float
    stdev: float

    @property
    def variation(self) -> float:
        """Standard deviation in per cent of the mean."""
        return 100 * self.stdev / self.avg if self.avg > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """``seconds`` per operation over ranks as -a says; ``iterations`` is the slowest rank's time of each."""

    seconds: float
    iterations: tuple[float, ...]

    @property
    def statistics(self) -> Statistics:
        times = sorted(self.iterations)
        return Statistics(
            min=times[0],
            max=times[-1],
            avg=statistics.fmean(times),
            p50=statistics.median(times),
            p95=percentile(times, 95),
            p99=percentile(times, 99),
            stdev=statistics.pstdev(times),
        )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least ``percent`` per cent of ``ordered`` do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def time_iterations(
    run: Callable[[], Any],
    refill: Callable[[], None],
    *,
    iters: int,
    warmup: int,
    safe: int,
    blocking: bool,
    cpu: bool,
) -> list[float]:
    """Seconds of each of ``iters`` calls of ``run`` on this rank.

    ``refill`` restores the input every ``safe`` calls, since a sum in place grows from call to call.
    """
    clock = time.process_time if cpu else time.perf_counter
    for done in range(0, warmup, safe):
        refill()
        for _ in range(min(safe, warmup - done)):
            run()
    times: list[float] = []
    while len(times) < iters:
        refill()
        dist.barrier()
        # Ranks leave the barrier up to a scheduler's tick apart; the collective itself brings them together.
        run()
        last = clock()
        for _ in range(min(max(1, safe - 1), iters - len(times))):
            if blocking:
                dist.barrier()
                last = clock()
            run()
            now = clock()
            times.append(now - last)
            last = now
    return times


def together(times: list[float], per_iteration: int, average: int) -> Timing:
    """All ranks' ``times``, of ``per_iteration`` operations each, as one; all ranks call it.

    ``average``: 0 is rank 0's mean, 1 the mean over ranks, 2 the fastest rank's, 3 the slowest rank's.
    """
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, times)
    return summary(everyone, per_iteration, average)


def summary(everyone: list[list[float]], per_iteration: int, average: int) -> Timing:
    """The times of all ranks, each a list, as one; ``average`` as in ``together``."""
    means = [statistics.fmean(theirs) / per_iteration for theirs in everyone]
    seconds = (means[0], statistics.fmean(means), min(means), max(means))[average]
    return Timing(
        seconds=seconds,
        iterations=tuple(max(column) / per_iteration for column in zip(*everyone, strict=True)),
    )


def safe_calls(dtype: torch.dtype, op: str, ranks: int) -> int:
    """How often a reduction may be repeated in place before floating-point values overflow (at least once: a
    single -m that is larger overflows, which costs no more time)."""
    if op != "sum" or ranks == 1 or dtype not in _ROOM:
        return 1_000_000
    return max(1, int(_ROOM[dtype] / math.log2(ranks)))
