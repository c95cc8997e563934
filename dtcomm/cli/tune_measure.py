"""What one rank of ``dtcomm tune`` does: every collective, algorithm, codec and size, in turns, within a budget."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import algorithms, codecs, collectives
from dtcomm.cli import codecs_speed, perf_host
from dtcomm.codecs import Codec
from dtcomm.runtime.communicator import find

Rank0 = dict[str, Any]
SMALLEST = 1024
ROUNDS = 5  # in which the algorithms take turns
CALLS = 30  # of a small message, at most, in each
RATED = ("none", "fp16", "bf16", "int8", "int4", "fp8_e4m3")
LEAST_SHARE = 0.3  # of the time asked for that is spent measuring, however long the ranks took to start
GROWTH = 100  # powers of two that a sum may grow by before its input is made anew


@dataclass(frozen=True, kw_only=True)
class Options:
    """``largest`` in bytes, ``seconds`` for everything since ``begun`` (of the machine's clock; None: the call)."""

    collectives: tuple[str, ...]
    codecs: tuple[str, ...]
    largest: int
    seconds: float
    quiet: bool = True
    begun: float | None = None


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One collective with one codec at one size, by several algorithms."""

    collective: str
    codec: Codec
    nbytes: int
    names: tuple[str, ...]


def group(options: Options) -> list[Rank0] | None:
    """Measure this group; all ranks call it. Rank 0 returns one entry, the others None."""
    perf_host.pin(None)
    ranks, hosts = dist.get_world_size(), _hosts()
    everything = list(contests(options, ranks, hosts))
    seconds = options.seconds
    if options.begun is not None:  # ranks that were slow to start have less, but enough to measure something
        seconds = max(seconds * LEAST_SHARE, seconds - (time.time() - options.begun))
    begin = time.perf_counter()
    times: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for at, contest in enumerate(everything):
        left = seconds - (time.perf_counter() - begin)
        budget = _agree(left / (len(everything) - at))
        if not options.quiet and dist.get_rank() == 0:
            print(f"\r{ranks} ranks: {at}/{len(everything)}  ", end="", file=sys.stderr, flush=True)
        for name, took in run(contest, budget).items():
            times.setdefault((contest.collective, name, str(contest.codec)), []).append(
                (contest.nbytes, took)
            )
    if not options.quiet and dist.get_rank() == 0:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    if dist.get_rank():
        return None
    measured = [
        {
            "collective": collective,
            "algorithm": name,
            "codec": codec,
            "ranks": ranks,
            "hosts": hosts,
            "points_us": [[size, round(seconds * 1e6, 3)] for size, seconds in points],
        }
        for (collective, name, codec), points in times.items()
    ]
    links = _links(times, hosts)
    return [{"ranks": ranks, "hosts": hosts, "measured": measured, "rates": _rates(), "links": links}]


def contests(options: Options, ranks: int, hosts: int) -> Iterator[Contest]:
    """The smallest first, so that a slow link leaves the most to be known when time is up."""
    every = 2 if options.seconds >= 10 else 3  # powers of two between sizes
    for size in (SMALLEST << at for at in range(0, 40, every)):
        if size > options.largest:
            break
        for collective in options.collectives:
            for spec in options.codecs:
                codec = codecs.codec(spec)
                if spec != "none" and collective != "all_reduce":
                    continue  # what copies or adds elsewhere is chosen by its times without a codec
                if collective != "all_reduce" and (size.bit_length() - 11) % 4:
                    continue
                names = algorithms.available(collective)
                if hosts == 1:
                    names = tuple(name for name in names if name != "hierarchical")
                yield Contest(collective=collective, codec=codec, nbytes=size, names=names)


def run(contest: Contest, seconds: float) -> dict[str, float]:
    """Seconds of each algorithm: the median over all rounds' calls of the slowest rank."""
    calls = {name: call_of(contest, name) for name in contest.names}
    once = {name: max(_timed(call, 2)[1:]) for name, (call, _) in calls.items()}
    rounds = ROUNDS
    total = _agree(sum(once.values()))
    each = max(1, min(CALLS, int(seconds / rounds / max(total, 1e-9))))
    if total * rounds > 2 * seconds:
        rounds = max(1, int(2 * seconds / total))
    each = int(_agree(float(each)))
    rounds = int(_agree(float(rounds)))
    series: dict[str, list[float]] = {name: [] for name in contest.names}
    safe = max(1, int(GROWTH / math.log2(dist.get_world_size())) - 2)
    for _ in range(rounds):
        for name, (call, refill) in calls.items():
            refill()
            series[name] += _timed(call, 1 + min(each, safe))[1:]
    mine = torch.tensor([series[name] for name in contest.names], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return {name: statistics.median(row) for name, row in zip(contest.names, mine.tolist(), strict=True)}


def call_of(contest: Contest, name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The call, and what makes its input anew."""
    ranks, spec = dist.get_world_size(), str(contest.codec)
    numel = max(1, contest.nbytes // 4)
    if contest.collective in ("all_reduce", "broadcast", "reduce"):
        tensor = torch.empty(numel)
        refill: Callable[[], Any] = lambda: tensor.normal_()  # noqa: E731
        match contest.collective:
            case "all_reduce":
                call: Callable[[], Any] = lambda: collectives.all_reduce(tensor, codec=spec, algorithm=name)  # noqa: E731
            case "broadcast":
                call = lambda: collectives.broadcast(tensor, 0, codec=spec, algorithm=name)  # noqa: E731
            case _:
                call = lambda: collectives.reduce(tensor, 0, codec=spec, algorithm=name)  # noqa: E731
        refill()
        return call, refill
    shard = torch.randn(max(1, numel // ranks))
    whole = torch.randn(shard.numel() * ranks)
    match contest.collective:
        case "reduce_scatter":
            return (lambda: collectives.reduce_scatter(shard, whole, codec=spec, algorithm=name)), _nothing
        case "all_gather":
            return (lambda: collectives.all_gather(whole, shard, codec=spec, algorithm=name)), _nothing
        case "all_to_all":
            other = torch.empty_like(whole)
            return (lambda: collectives.all_to_all(other, whole, codec=spec, algorithm=name)), _nothing
        case "gather":
            out = whole if dist.get_rank() == 0 else None
            return (lambda: collectives.gather(shard, out, 0, codec=spec, algorithm=name)), _nothing
        case _:
            source = whole if dist.get_rank() == 0 else None
            return (lambda: collectives.scatter(shard, source, 0, codec=spec, algorithm=name)), _nothing


def _nothing() -> None:
    pass


def _timed(call: Callable[[], Any], count: int) -> list[float]:
    # The first of them brings the ranks together.
    times = []
    last = time.perf_counter()
    for _ in range(count):
        call()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times


def _agree(value: float) -> float:
    """The largest of all ranks' values."""
    said = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(said, dist.ReduceOp.MAX)
    return float(said)


def _hosts() -> int:
    collectives.barrier()
    return find(None).hosts


def _rates() -> dict[str, list[float]]:
    """GB/s of fp32, encoding and decoding, of this rank's core."""
    found = {}
    for spec in RATED:
        speed = codecs_speed.measure(codecs.codec(spec), 4 << 20, 0.02)
        found[spec] = [round(speed.encode, 3), round(speed.decode, 3)]
    return found


def _links(
    times: dict[tuple[str, str, str], list[tuple[int, float]]], hosts: int
) -> dict[str, dict[str, float]]:
    """The link that all_reduce's two shots see: the smallest message's time by its two steps, and the largest's by
    what a rank sends in it, 2 (n - 1) / n tensors.
    """
    points = times.get(("all_reduce", "two_shot", "none"))
    if not points:
        return {}
    ranks = dist.get_world_size()
    (_, least), (most, longest) = points[0], points[-1]
    sent = most * 2 * (ranks - 1) / ranks
    link = {
        "latency_us": round(least / 2 * 1e6, 3),
        "gbytes": round(sent / max(longest - least, 1e-9) / 1e9, 4),
        "message_us": 0.0,
    }
    return {"inside" if hosts == 1 else "between": link}
