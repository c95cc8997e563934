"""What one rank of ``dtcomm tune`` does: sample every collective, algorithm, codec and size until the time is up.

A sample times all algorithms of a case one after the other, for a few milliseconds each. A disturbance of the machine
affects few of the samples, and the lower quartile of a case's samples is kept.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import algorithms, codecs, collectives
from dtcomm.cli import show_progress
from dtcomm.cli.codecs import measure_speed
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.libraries import bind_collective
from dtcomm.cli.perf.placement import pin_to_core
from dtcomm.codecs import Codec
from dtcomm.measure.exact_inputs import SHARDS_IN
from dtcomm.planner.cost_model import Measured
from dtcomm.runtime.communicator import get_communicator
from dtcomm.schedule.simulate import ComputeCost, LinkCost
from dtcomm.streams import Streams, streams_of
from dtcomm.tp.inference import AllReduce

Curves = dict[str, list[tuple[int, float]]]  # by algorithm: seconds by size
SMALLEST = 1024
DENSE_SIZES = 8 << 20  # bytes up to which every power of two is measured
RATED_CODECS = ("none", "fp16", "bf16", "int8", "int4", "fp8_e4m3")
MIN_SHARE = 0.3  # of the requested time is always spent measuring, even if the ranks took long to start


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to measure.

    Attributes:
        largest: Largest size in bytes.
        imports: Modules that the ranks import, which register the user's algorithms.
        seconds: Time for everything since ``begun``.
        begun: Start in seconds of time.time(); None for the start of the call.
    """

    collectives: tuple[str, ...]
    codecs: tuple[str, ...]
    largest: int
    seconds: float
    imports: tuple[str, ...] = ()
    quiet: bool = True
    begun: float | None = None


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """What was measured of a group; the fields are those of `Table`, ``links`` by name."""

    ranks: int
    hosts: int
    measured: tuple[Measured, ...]
    rates: tuple[tuple[str, ComputeCost], ...]
    links: dict[str, LinkCost]
    compress_from: tuple[tuple[str, int, int, float], ...] = ()


def measure_group(options: TuneOptions) -> GroupResult | None:
    """Measure the default group; all ranks must call it. Rank 0 returns the result, the others None."""
    pin_to_core(None)
    ranks, hosts = dist.get_world_size(), host_count()
    cases = list(benchmark_cases(options, ranks, hosts))
    seconds = options.seconds
    if options.begun is not None:  # the start of the ranks counts, but some time always remains
        seconds = max(seconds * MIN_SHARE, seconds - (time.time() - options.begun))
    label = "" if options.quiet else f"{ranks} ranks"
    samples = sample_cases(cases, seconds, label=label)
    if dist.get_rank():
        return None
    measured = tuple(
        Measured(
            collective=collective,
            algorithm=name,
            codec=codec,
            ranks=ranks,
            hosts=hosts,
            points=tuple(points),
        )
        for (collective, codec), curves in _by_collective_and_codec(samples).items()
        for name, points in curves.items()
    )
    return GroupResult(ranks=ranks, hosts=hosts, measured=measured, rates=_rates(), links=_links(measured))


SUM_BYTES = 64 * 1024  # the smallest sum of activations
SUM_ROUNDS, SUM_CALLS = 7, 10


def measure_sums(
    specs: Sequence[str],
    largest: int,
    hosts: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> tuple[tuple[str, int, int, float], ...]:
    """Return `Table.compress_from`: from which size on `tp.AllReduce` in a codec beats the group's own sum.

    All ranks on ``hosts`` hosts call it, with a ``device`` that the group's backend serves, and get the same.
    Activations are bf16 tensors of powers of two up to ``largest`` bytes.
    """
    sizes = [SUM_BYTES << power for power in range(40) if SUM_BYTES << power <= largest]
    x = torch.zeros(largest // 2, dtype=torch.bfloat16, device=device)  # a sum in place stays as it is
    sums = {
        spec: AllReduce(group, largest, spec, compress_from=0, device=device)
        for spec in specs
        if spec != "none"
    }
    streams = streams_of(device)
    own: list[float] = []
    coded: dict[str, list[float]] = {spec: [] for spec in sums}
    for size in sizes:
        tensor = x[: size // 2]
        out = torch.empty_like(tensor)
        own.append(_slowest_seconds(partial(dist.all_reduce, tensor, group=group), streams))
        for spec, all_reduce in sums.items():
            coded[spec].append(_slowest_seconds(partial(all_reduce, tensor, out), streams))
    ranks = dist.get_world_size(group)
    return tuple((spec, ranks, hosts, first_faster(sizes, own, coded[spec])) for spec in sums)


def _slowest_seconds(call: Callable[[], Any], streams: Streams) -> float:
    """Return the seconds that a call takes of the device, the median, on the slowest rank."""
    call()
    times = []
    for _ in range(SUM_ROUNDS):
        begin = streams.mark()
        for _ in range(SUM_CALLS):
            call()
        end = streams.mark()
        streams.synchronize(end)
        times.append(streams.elapsed(begin, end) / SUM_CALLS)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def first_faster(sizes: Sequence[int], own: Sequence[float], coded: Sequence[float]) -> float:
    """Return the size from which on all times in ``coded`` are below those in ``own``; infinity for no size."""
    first = math.inf
    for size, uncompressed, compressed in zip(reversed(sizes), reversed(own), reversed(coded), strict=True):
        if compressed >= uncompressed:
            break
        first = size
    return first


def _by_collective_and_codec(samples: list[CaseSamples]) -> dict[tuple[str, str], Curves]:
    """Return curves by collective and codec."""
    kinds: dict[tuple[str, str], Curves] = {}
    for case_samples in samples:
        kind = (case_samples.case.collective, str(case_samples.case.codec))
        for name, medians in case_samples.medians.items():
            point = case_samples.case.nbytes, lower_quartile(medians)
            kinds.setdefault(kind, {}).setdefault(name, []).append(point)
    return kinds


def benchmark_cases(options: TuneOptions, ranks: int, hosts: int) -> Iterator[BenchmarkCase]:
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


def host_count() -> int:
    """Return the number of hosts of the default group; all its ranks call it."""
    collectives.barrier()
    communicator = get_communicator(None)
    communicator.connect()
    return communicator.hosts


def _rates() -> tuple[tuple[str, ComputeCost], ...]:
    """Return the seconds per element that this rank's core takes to encode and to decode."""
    speeds = {spec: measure_speed(codecs.codec(spec), 4 << 20, 0.02) for spec in RATED_CODECS}
    return tuple(
        (spec, ComputeCost(encode=4e-9 / speed.encode, decode=4e-9 / speed.decode))
        for spec, speed in speeds.items()
    )


def _links(measured: Sequence[Measured]) -> dict[str, LinkCost]:
    """Estimate latency and bandwidth of the link from the times of the two-shot all_reduce.

    The smallest message's time is two latencies; the largest message's time is that of the 2 (n - 1) / n tensors that a
    rank sends.
    """
    wanted = ("all_reduce", "two_shot", "none")
    for row in measured:
        if (row.collective, row.algorithm, row.codec) == wanted:
            (_, shortest), (largest, longest) = row.points[0], row.points[-1]
            sent = largest * 2 * (row.ranks - 1) / row.ranks
            link = LinkCost(latency=shortest / 2, bandwidth=sent / max(longest - shortest, 1e-9))
            return {"inside" if row.hosts == 1 else "between": link}
    return {}


GROWTH = 100  # powers of two by which a sum in place may grow in a sample
# calls of an algorithm in a sample, besides the first, which synchronizes the ranks
MAX_CALLS, MIN_CALLS = 30, 2
SAMPLE_SECONDS = 2e-3  # of an algorithm in a sample, unless its calls are longer
MAX_SAMPLES = 40  # of a case


@dataclass(frozen=True, kw_only=True)
class BenchmarkCase:
    """One collective with one codec at one size, in bytes of fp32, with the algorithms to compare."""

    collective: str
    codec: Codec
    nbytes: int
    algorithms: tuple[str, ...]


@dataclass(kw_only=True)
class CaseSamples:
    """Times of a case: by algorithm, the median of each sample in seconds."""

    case: BenchmarkCase
    medians: dict[str, list[float]] = field(default_factory=dict)


def lower_quartile(values: Sequence[float]) -> float:
    """Return the lower quartile by rank, without interpolation."""
    return sorted(values)[(len(values) - 1) // 4]


def sample_cases(cases: Sequence[BenchmarkCase], seconds: float, *, label: str = "") -> list[CaseSamples]:
    """Sample all ``cases`` for ``seconds``; all ranks must call it, and all return the same.

    A case that did not fit into the time has no medians. ``label`` is the text of the progress on stderr; empty for
    none.
    """
    return _Sampler(cases, label).run(seconds)


class _Sampler:
    def __init__(self, cases: Sequence[BenchmarkCase], label: str) -> None:
        self._cases, self._label = cases, label
        self._safe = int(GROWTH / math.log2(dist.get_world_size())) - 2
        self._inputs = _Inputs(max(case.nbytes for case in cases))
        self._order: list[int] = []  # the index of the case of each sample
        self._samples: list[torch.Tensor] = []  # times on this rank: a row for each algorithm
        self._sample_seconds: dict[int, float] = {}  # duration of a sample, by index of the case
        self._call_seconds: dict[int, float] = {}  # one call of each algorithm, by index of the case
        self._counts: Counter[int] = Counter()  # samples by index of the case

    def run(self, seconds: float) -> list[CaseSamples]:
        begin = time.perf_counter()
        while True:
            left = seconds - (time.perf_counter() - begin)
            index, calls = _broadcast_choice(self._next(left) if dist.get_rank() == 0 else None)
            if index < 0:
                break
            self._order.append(index)
            started = time.perf_counter()
            self._samples.append(self._sample(self._cases[index], calls))
            self._sample_seconds[index] = time.perf_counter() - started
            self._call_seconds[index] = float(self._samples[-1].median(dim=1).values.sum())
            self._counts[index] += 1
            self._show(1 - left / seconds)
        self._show(None)
        return self._collect()

    def _next(self, left: float) -> tuple[int, int]:
        """Return rank 0's choice: the case's index (-1 for the end), and the calls of each algorithm."""
        candidates = [
            index
            for index in range(len(self._cases))
            if self._counts[index] < MAX_SAMPLES and self._expected_seconds(index) <= left
        ]
        if not candidates or left <= 0:
            return -1, 0
        # Every case once, then shorter cases more often.
        index = min(
            candidates,
            key=lambda at: self._counts[at] * math.sqrt(self._sample_seconds.get(at, 0.0)),
        )
        algorithms = len(self._cases[index].algorithms)
        calls = int(SAMPLE_SECONDS * algorithms / self._call_seconds.get(index, math.inf))
        return index, max(MIN_CALLS, min(MAX_CALLS, self._safe, calls))

    def _expected_seconds(self, index: int) -> float:
        """Return the duration of a sample; for a new size, in proportion to smaller sizes."""
        if index in self._sample_seconds:
            return self._sample_seconds[index]
        case = self._cases[index]
        smaller = [
            seconds * case.nbytes / other.nbytes
            for other_index, seconds in self._sample_seconds.items()
            for other in (self._cases[other_index],)
            if (other.collective, other.codec) == (case.collective, case.codec) and other.nbytes < case.nbytes
        ]
        return min(smaller, default=0.0)

    def _sample(self, case: BenchmarkCase, calls: int) -> torch.Tensor:
        times = []
        for name in case.algorithms:
            call, restore = self._inputs.bind(case, name)
            times.append(_time_calls(call, calls + 1)[1:])
            restore(calls + 1)
        return torch.tensor(times, dtype=torch.float64)

    def _collect(self) -> list[CaseSamples]:
        result = [CaseSamples(case=case) for case in self._cases]
        if not self._samples:
            return result
        slowest = torch.cat([sample.flatten() for sample in self._samples])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        parts = torch.split(slowest, [sample.numel() for sample in self._samples])
        for index, part, own in zip(self._order, parts, self._samples, strict=True):
            by_name = result[index].medians
            for name, row in zip(self._cases[index].algorithms, part.view_as(own).tolist(), strict=True):
                by_name.setdefault(name, []).append(statistics.median(row))
        return result

    def _show(self, share: float | None) -> None:
        if self._label and dist.get_rank() == 0:
            show_progress("" if share is None else f"{self._label}: {share:4.0%}")


class _Inputs:
    """Tensors of every size: slices of two tensors, because allocating new ones would take longer than a sample."""

    def __init__(self, largest: int) -> None:
        self._ranks = dist.get_world_size()
        numel = max(1, largest // 4)
        self._tensors = torch.empty(numel).normal_(), torch.empty(numel).normal_()

    def bind(self, case: BenchmarkCase, name: str) -> tuple[Callable[[], Any], Callable[[int], None]]:
        """Return a function that makes the call, and one that restores its input after a number of calls."""
        numel = max(1, case.nbytes // 4)
        first, second = self._tensors
        out = source = first[:numel]
        if COLLECTIVES[case.collective].sharded:
            size = max(1, numel // self._ranks)
            whole, shard = first[: size * self._ranks], second[:size]
            out, source = (shard, whole) if case.collective in SHARDS_IN else (whole, shard)
            if case.collective == "all_to_all":
                out = second[: whole.numel()]
        options = {"codec": str(case.codec), "algorithm": name}
        call = bind_collective(case.collective, out, source, "sum", 0, options)
        if case.collective == "all_reduce":
            return call, lambda calls: self._shrink(out, calls)
        # The input of a reduction's root grows by one tensor a call, too slowly to overflow.
        return call, lambda calls: None

    def _shrink(self, tensor: torch.Tensor, calls: int) -> None:
        # A sum in place multiplies by the number of ranks, once all inputs are equal.
        tensor.mul_(float(self._ranks) ** -calls)


def _time_calls(call: Callable[[], Any], count: int) -> list[float]:
    times = []
    last = time.perf_counter()
    for _ in range(count):
        call()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times


def _broadcast_choice(choice: tuple[int, int] | None) -> tuple[int, int]:
    """Broadcast rank 0's choice of (case, calls) to all ranks."""
    values = torch.tensor(choice or (0, 0))
    dist.broadcast(values, 0)
    case, calls = values.tolist()
    return case, calls
