"""The clock: one operation, timed many times on all ranks together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.cli.perf.options import Options
from dtcomm.measure.device_clock import Clock

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
    clock: Clock,
    barrier: Callable[[], Any],
    *,
    iters: int,
    warmup: int,
    safe: int,
    blocking: bool,
) -> list[float]:
    """Seconds of each of ``iters`` calls of ``run`` on this rank, between marks of the clock.

    ``refill`` restores the input every ``safe`` calls, since a sum in place grows from call to call. The host waits
    for a device once before and once after such a batch; ``blocking``: and before each call.
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
        # Ranks leave the barrier up to a scheduler's tick apart; the collective itself brings them together.
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


def time_graphs(
    run: Callable[[], Any],
    refill: Callable[[], None],
    clock: Clock,
    barrier: Callable[[], Any],
    *,
    calls: int,
    replays: int,
    warmup: int,
) -> list[float]:
    """Seconds of each of ``replays`` replays of ``calls`` calls of ``run``, captured as one graph.

    Before that as many calls as ``warmup`` says are made as they are, and one replay is not timed. The host queues all
    replays, each with a fresh input, and waits once.
    """
    for _ in range(max(1, warmup)):  # what connects at the first call cannot be captured
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


def timed(
    options: Options,
    run: Callable[[], Any],
    refill: Callable[[], None] | None,
    clock: Clock,
    barrier: Callable[[], Any],
    safe: int,
    gather: Callable[[list[float]], list[list[float]]] | None = None,
) -> Timing:
    """As the options ask for: call by call, or by replays of a graph; all ranks call it.

    ``refill`` restores inputs that grow, which they may in ``safe`` calls; None: they stay as they are. ``gather``
    brings the times of all ranks, by default over torch.distributed.
    """
    safe = safe if refill is not None else options.iters + options.warmup_iters + 1
    again = refill or (lambda: None)
    calls = 1
    if options.cudagraph:
        calls = min(options.iters, safe)
        times = time_graphs(
            run, again, clock, barrier, calls=calls, replays=options.cudagraph, warmup=options.warmup_iters
        )
    else:
        times = time_iterations(
            run,
            again,
            clock,
            barrier,
            iters=options.iters,
            warmup=options.warmup_iters,
            safe=safe,
            blocking=options.blocking > 0,
        )
    everyone = (gather or everywhere)(times)
    return summary(everyone, options.agg_iters * calls, options.average)


def everywhere(times: list[float]) -> list[list[float]]:
    """Those of all ranks, which call it together."""
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, times)
    return everyone


def summary(everyone: list[list[float]], per_iteration: int, average: int) -> Timing:
    """All ranks' times, each a list, of ``per_iteration`` operations each, as one.

    ``average``: 0 is rank 0's mean, 1 the mean over ranks, 2 the fastest rank's, 3 the slowest rank's.
    """
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
