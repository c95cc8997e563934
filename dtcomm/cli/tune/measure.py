"""What one rank of ``dtcomm tune`` does: every collective, algorithm, codec and size, in turns, within a budget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dtcomm import algorithms, codecs, collectives
from dtcomm.cli.codecs import speed as codecs_speed
from dtcomm.cli.perf import placement
from dtcomm.cli.tune import cpu_placement
from dtcomm.cli.tune.sampling import Contest, Visits, visit_all
from dtcomm.planner.cost_model import PLACEMENTS
from dtcomm.runtime.communicator_cache import get_communicator

Rank0 = dict[str, Any]
Curves = dict[tuple[str, str], list[tuple[int, float]]]  # by placement and algorithm: seconds by size
SMALLEST = 1024
DENSE = 8 << 20  # bytes
RATED = ("none", "fp16", "bf16", "int8", "int4", "fp8_e4m3")
LEAST_SHARE = 0.3  # of the time asked for that is spent measuring, however long the ranks took to start


@dataclass(frozen=True, kw_only=True)
class Options:
    """``largest`` in bytes, ``seconds`` for everything since ``begun`` (of the machine's clock; None: the call)."""

    collectives: tuple[str, ...]
    codecs: tuple[str, ...]
    largest: int
    seconds: float
    quiet: bool = True
    begun: float | None = None


def group(options: Options) -> list[Rank0] | None:
    """Measure this group; all ranks call it. Rank 0 returns one entry, the others None."""
    cpus = cpu_placement.cpus()
    placement.pin_to_core(None)
    ranks, hosts = dist.get_world_size(), _hosts()
    everything = list(contests(options, ranks, hosts))
    seconds = options.seconds
    if options.begun is not None:  # ranks that were slow to start have less, but enough to measure something
        seconds = max(seconds * LEAST_SHARE, seconds - (time.time() - options.begun))
    say = "" if options.quiet else f"{ranks} ranks"
    found = visit_all(everything, seconds, cpus if hosts == 1 else (), say=say)
    if dist.get_rank():
        return None
    measured = [
        {
            "collective": collective,
            "algorithm": name,
            "codec": codec,
            "ranks": ranks,
            "hosts": hosts,
            "placement": where,
            "points_us": [[size, round(seconds * 1e6, 3)] for size, seconds in points],
        }
        for (collective, codec), curves in _by_contest(found).items()
        for (where, name), points in curves.items()
    ]
    links = _links(measured)
    return [{"ranks": ranks, "hosts": hosts, "measured": measured, "rates": _rates(), "links": links}]


def _by_contest(found: list[Visits]) -> dict[tuple[str, str], Curves]:
    """By collective and codec. What was seen of a placement counts where all its sizes were, else all as one."""
    kinds: dict[tuple[str, str], list[Visits]] = {}
    for visits in found:
        if visits.medians:
            kinds.setdefault((visits.contest.collective, str(visits.contest.codec)), []).append(visits)
    return {kind: _curves(sizes) for kind, sizes in kinds.items()}


def _curves(sizes: list[Visits]) -> Curves:
    whole = [where for where in PLACEMENTS if all(where in visits.medians for visits in sizes)]
    curves: Curves = {}
    for visits in sizes:
        for where in whole or [""]:
            times = visits.seconds(where) if whole else visits.anywhere()
            for name, seconds in times.items():
                curves.setdefault((where, name), []).append((visits.contest.nbytes, seconds))
    return curves


def contests(options: Options, ranks: int, hosts: int) -> Iterator[Contest]:
    """The smallest first, so that a slow link leaves the most to be known when time is up."""
    for power in range(40):
        size = SMALLEST << power
        if size > options.largest:
            break
        for collective in options.collectives:
            for spec in options.codecs:
                codec = codecs.codec(spec)
                if spec != "none" and collective != "all_reduce":
                    continue  # what copies or adds elsewhere is chosen by its times without a codec
                if power % _every(options.seconds, collective, size):
                    continue
                names = algorithms.available(collective)
                if hosts == 1:
                    names = tuple(name for name in names if name != "hierarchical")
                yield Contest(collective=collective, codec=codec, nbytes=size, names=names)


def _every(seconds: float, collective: str, size: int) -> int:
    """Which powers of two are measured: all where time allows and algorithms change places."""
    if seconds < 10:
        return 3
    return 1 if collective == "all_reduce" and size <= DENSE else 2


def _hosts() -> int:
    collectives.barrier()
    return get_communicator(None).hosts


def _rates() -> dict[str, list[float]]:
    """GB/s of fp32, encoding and decoding, of this rank's core."""
    found = {}
    for spec in RATED:
        speed = codecs_speed.measure(codecs.codec(spec), 4 << 20, 0.02)
        found[spec] = [round(speed.encode, 3), round(speed.decode, 3)]
    return found


def _links(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The link that all_reduce's two shots see: the smallest message's time by its two steps, and the largest's by
    what a rank sends in it, 2 (n - 1) / n tensors.
    """
    wanted = ("all_reduce", "two_shot", "none")
    found = [row for row in measured if (row["collective"], row["algorithm"], row["codec"]) == wanted]
    if not found:
        return {}
    (_, least), (most, longest) = found[0]["points_us"][0], found[0]["points_us"][-1]
    ranks, hosts = found[0]["ranks"], found[0]["hosts"]
    sent = most * 2 * (ranks - 1) / ranks
    link = {
        "latency_us": round(least / 2, 3),
        "gbytes": round(sent / max(longest - least, 1e-3) / 1e3, 4),
        "message_us": 0.0,
    }
    return {"inside" if hosts == 1 else "between": link}
