"""What one rank of ``dtcomm tune`` does: measure every collective, algorithm, codec and size in a given time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dtcomm import algorithms, codecs, collectives
from dtcomm.cli.codecs import measure as codecs_measure
from dtcomm.cli.perf import placement
from dtcomm.cli.tune import cpu_placement
from dtcomm.cli.tune.sampling import BenchmarkCase, CaseSamples, sample_cases
from dtcomm.planner.cost_model import PLACEMENTS
from dtcomm.runtime.communicator_cache import get_communicator

GroupResult = dict[str, Any]
Curves = dict[tuple[str, str], list[tuple[int, float]]]  # by placement and algorithm: seconds by size
SMALLEST = 1024
DENSE_SIZES = 8 << 20  # bytes up to which every power of two is measured
RATED_CODECS = ("none", "fp16", "bf16", "int8", "int4", "fp8_e4m3")
MIN_SHARE = 0.3  # of the requested time is always spent measuring, even if the ranks took long to start


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        collectives: Names of collectives.
        codecs: Codec specs.
        largest: Largest size in bytes.
        seconds: Time for everything since ``begun``.
        quiet: Whether to print no progress.
        begun: Start in seconds of time.time(); None for the start of the call.
    """

    collectives: tuple[str, ...]
    codecs: tuple[str, ...]
    largest: int
    seconds: float
    quiet: bool = True
    begun: float | None = None


def measure_group(options: Options) -> list[GroupResult] | None:
    """Measure the default group; all ranks must call it. Rank 0 returns a list of one result, the others None."""
    cpus = cpu_placement.first_two_cpus()
    placement.pin_to_core(None)
    ranks, hosts = dist.get_world_size(), _host_count()
    cases = list(benchmark_cases(options, ranks, hosts))
    seconds = options.seconds
    if options.begun is not None:  # the start of the ranks counts, but some time always remains
        seconds = max(seconds * MIN_SHARE, seconds - (time.time() - options.begun))
    label = "" if options.quiet else f"{ranks} ranks"
    samples = sample_cases(cases, seconds, cpus if hosts == 1 else (), label=label)
    if dist.get_rank():
        return None
    measured = [
        {
            "collective": collective,
            "algorithm": name,
            "codec": codec,
            "ranks": ranks,
            "hosts": hosts,
            "placement": placement_name,
            "points_us": [[size, round(seconds * 1e6, 3)] for size, seconds in points],
        }
        for (collective, codec), curves in _by_collective_and_codec(samples).items()
        for (placement_name, name), points in curves.items()
    ]
    links = _links(measured)
    return [{"ranks": ranks, "hosts": hosts, "measured": measured, "rates": _rates(), "links": links}]


def _by_collective_and_codec(samples: list[CaseSamples]) -> dict[tuple[str, str], Curves]:
    """Return curves by collective and codec.

    Placements in which all sizes were sampled have curves of their own; without any, all samples are combined.
    """
    kinds: dict[tuple[str, str], list[CaseSamples]] = {}
    for case_samples in samples:
        if case_samples.medians:
            kind = (case_samples.case.collective, str(case_samples.case.codec))
            kinds.setdefault(kind, []).append(case_samples)
    return {kind: _curves(sizes) for kind, sizes in kinds.items()}


def _curves(sizes: list[CaseSamples]) -> Curves:
    complete = [name for name in PLACEMENTS if all(name in samples.medians for samples in sizes)]
    curves: Curves = {}
    for samples in sizes:
        for placement_name in complete or [""]:
            times = samples.seconds(placement_name) if complete else samples.seconds_of_all_placements()
            for name, seconds in times.items():
                curves.setdefault((placement_name, name), []).append((samples.case.nbytes, seconds))
    return curves


def benchmark_cases(options: Options, ranks: int, hosts: int) -> Iterator[BenchmarkCase]:
    """Yield the cases, smallest first, so that a slow link leaves as few cases as possible unmeasured."""
    for power in range(40):
        size = SMALLEST << power
        if size > options.largest:
            break
        for collective in options.collectives:
            for spec in options.codecs:
                codec = codecs.codec(spec)
                if spec != "none" and collective != "all_reduce":
                    continue  # for other collectives the times without a codec decide
                if power % _size_step(options.seconds, collective, size):
                    continue
                names = algorithms.available(collective)
                if hosts == 1:
                    names = tuple(name for name in names if name != "hierarchical")
                yield BenchmarkCase(collective=collective, codec=codec, nbytes=size, algorithms=names)


def _size_step(seconds: float, collective: str, size: int) -> int:
    """Return the step between measured powers of two: 1 for sizes at which the fastest algorithm changes."""
    if seconds < 10:
        return 3
    return 1 if collective == "all_reduce" and size <= DENSE_SIZES else 2


def _host_count() -> int:
    collectives.barrier()
    return get_communicator(None).hosts


def _rates() -> dict[str, list[float]]:
    """Return encoding and decoding rates of this rank's core, in GB/s of fp32."""
    rates = {}
    for spec in RATED_CODECS:
        speed = codecs_measure.measure_speed(codecs.codec(spec), 4 << 20, 0.02)
        rates[spec] = [round(speed.encode, 3), round(speed.decode, 3)]
    return rates


def _links(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Estimate latency and bandwidth of the link from the times of the two-shot all_reduce.

    The smallest message's time is two latencies; the largest message's time is that of the 2 (n - 1) / n tensors that a
    rank sends.
    """
    wanted = ("all_reduce", "two_shot", "none")
    rows = [row for row in measured if (row["collective"], row["algorithm"], row["codec"]) == wanted]
    if not rows:
        return {}
    (_, shortest_us), (largest, longest_us) = rows[0]["points_us"][0], rows[0]["points_us"][-1]
    ranks, hosts = rows[0]["ranks"], rows[0]["hosts"]
    sent = largest * 2 * (ranks - 1) / ranks
    link = {
        "latency_us": round(shortest_us / 2, 3),
        "gbytes": round(sent / max(longest_us - shortest_us, 1e-3) / 1e3, 4),
        "message_us": 0.0,
    }
    return {"inside" if hosts == 1 else "between": link}
