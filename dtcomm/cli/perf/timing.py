"""Timing of one operation that all ranks repeat together, and statistics of the times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtcomm.cli.perf.args import PerfOptions
from dtcomm.compress.checkpoint import gather
from dtcomm.measure import Clock

# Powers of two by which a normally distributed value may grow before it overflows.
_HEADROOM_BITS = {torch.float16: 12, torch.bfloat16: 100, torch.float32: 100, torch.float64: 900}


@dataclass(frozen=True, kw_only=True)
class IterationTimes:
    """Statistics of the iterations' times in seconds, each time that of the slowest rank."""

    min: float
    max: float
    avg: float
    p50: float
    p95: float
    p99: float
    stdev: float

    @property
    def variation(self) -> float:
        """Standard deviation in percent of the mean."""
        return 100 * self.stdev / self.avg if self.avg > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of an operation in seconds.

    ``seconds`` is per operation, combined over ranks as -a says; ``iterations`` has the slowest rank's time of each
    iteration.
    """

    seconds: float
    iterations: tuple[float, ...]

    @property
    def statistics(self) -> IterationTimes:
        times = sorted(self.iterations)
        return IterationTimes(
            min=times[0],
            max=times[-1],
            avg=statistics.fmean(times),
            p50=statistics.median(times),
            p95=percentile(times, 95),
            p99=percentile(times, 99),
            stdev=statistics.pstdev(times),
        )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least ``percent`` percent of the sorted values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def time_iterations(
    run: Callable[[], Any],
    refill: Callable[[], None],
    clock: Clock,
    barrier: Callable[[], Any],
    *,
    iters: int,
    warmup: int,
    safe: int,
    blocking: bool,
) -> list[float]:
    """Return the seconds of each of ``iters`` calls of ``run`` on this rank.

    ``refill`` restores the input every ``safe`` calls, because a sum in place grows from call to call. The host waits
    for the device before and after such a batch; with ``blocking`` also before each call.
    """
    for done in range(0, warmup, safe):
        refill()
        for _ in range(min(safe, warmup - done)):
            run()
    times: list[float] = []
    mark = clock.record
    while len(times) < iters:
        refill()
        clock.synchronize()
        barrier()
        # Ranks leave the barrier up to a scheduler tick apart; an untimed call synchronizes them.
        run()
        spans, begin = [], mark()
        for _ in range(min(max(1, safe - 1), iters - len(times))):
            if blocking:
                clock.synchronize()
                barrier()
                begin = mark()
            run()
            end = mark()
            spans.append((begin, end))
            begin = end
        clock.synchronize()
        times += [clock.seconds(begin, end) for begin, end in spans]
    return times


def time_graph_replays(
    run: Callable[[], Any],
    refill: Callable[[], None],
    clock: Clock,
    barrier: Callable[[], Any],
    *,
    calls: int,
    replays: int,
    warmup: int,
) -> list[float]:
    """Return the seconds of each of ``replays`` replays of a graph of ``calls`` calls of ``run``.

    ``warmup`` calls are made without a graph first, and one replay is not timed. The host queues all replays, each with
    a fresh input, and waits once.
    """
    for _ in range(max(1, warmup)):  # connections made by the first call cannot be captured
        refill()
        run()
    clock.synchronize()
    replay = clock.graph(run, calls)
    refill()
    replay()
    clock.synchronize()
    barrier()
    marks = []
    for _ in range(replays):
        refill()
        begin = clock.record()
        replay()
        marks.append((begin, clock.record()))
    clock.synchronize()
    return [clock.seconds(begin, end) for begin, end in marks]


def time_operation(
    options: PerfOptions,
    run: Callable[[], Any],
    refill: Callable[[], None] | None,
    clock: Clock,
    barrier: Callable[[], Any],
    safe: int,
) -> Timing:
    """Time an operation call by call, or by graph replays, as the options say; all ranks must call it.

    ``refill`` restores inputs that grow from call to call, after ``safe`` calls; None if they do not grow.
    """
    safe = safe if refill is not None else options.iters + options.warmup_iters + 1
    restore = refill or (lambda: None)
    timed, warmup = (run, restore, clock, barrier), options.warmup_iters
    calls = 1
    if options.cudagraph:
        calls = min(options.iters, safe)
        times = time_graph_replays(*timed, calls=calls, replays=options.cudagraph, warmup=warmup)
    else:
        blocking = options.blocking > 0
        times = time_iterations(*timed, iters=options.iters, warmup=warmup, safe=safe, blocking=blocking)
    return summarize(gather(times), options.agg_iters * calls, options.average)


def summarize(by_rank: list[list[float]], per_iteration: int, average: int) -> Timing:
    """Combine the ranks' times of iterations with ``per_iteration`` operations each.

    ``average`` 0 takes rank 0's mean, 1 the mean over ranks, 2 the fastest rank's and 3 the slowest rank's.
    """
    means = [statistics.fmean(times) / per_iteration for times in by_rank]
    seconds = (means[0], statistics.fmean(means), min(means), max(means))[average]
    return Timing(
        seconds=seconds,
        iterations=tuple(max(column) / per_iteration for column in zip(*by_rank, strict=True)),
    )


def calls_before_overflow(dtype: torch.dtype, op: str, ranks: int) -> int:
    """Return how often a reduction may be repeated in place before floating-point values overflow, at least 1."""
    if op != "sum" or ranks == 1 or dtype not in _HEADROOM_BITS:
        return 1_000_000
    return max(1, int(_HEADROOM_BITS[dtype] / math.log2(ranks)))
