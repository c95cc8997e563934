"""What one rank does: every size, type and variant in turn, timed and checked, with rank 0 telling the story."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.cli import perf_backends, perf_host, perf_measure
from dtcomm.cli.perf_backends import Backend, Call
from dtcomm.cli.perf_check import Case, Verdict, judge, values_for
from dtcomm.cli.perf_collectives import COLLECTIVES, DTYPES
from dtcomm.cli.perf_host import Rank
from dtcomm.cli.perf_measure import Timing
from dtcomm.cli.perf_options import Options, Variant
from dtcomm.testing import exact

BUFFERS_IN_FLIGHT = 4  # -m starts more operations than this on the same tensors in turn


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One timed and checked operation; ``verdict`` is None with -c 0, its ``wrong`` summed over the ranks."""

    timing: Timing
    verdict: Verdict | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; ``wire_bytes`` is that of the rank which sends most, None where nobody counts."""

    size: int
    count: int
    datatype: str
    op: str
    root: int
    variant: Variant
    wire_bytes: int | None
    out_of_place: Measurement | None
    in_place: Measurement | None
    ratio: float | None = None
    ratios: dict[str, float] = field(
        default_factory=dict
    )  # by --compare's names: their median time over this one's

    @property
    def compared(self) -> Measurement:
        """What ratios are taken of: in place where there is such a thing."""
        measured = self.in_place or self.out_of_place
        assert measured is not None
        return measured


@dataclass(kw_only=True)
class Report:
    """Everything that was found; the same on every rank, times included."""

    options: Options
    ranks: list[Rank]
    backends: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    ended: float = 0.0

    @property
    def wrong(self) -> int:
        measured = [m for row in self.rows for m in (row.out_of_place, row.in_place) if m is not None]
        return sum(m.verdict.wrong for m in measured if m.verdict is not None)


class Listener:
    """What hears of the run as it goes on; rank 0's prints the table."""

    def begin(self, report: Report, steps: int) -> None:
        """Before the first row; ``steps`` rows will follow, 0 if nobody knows."""

    def step(self, what: str) -> None:
        """A row is about to be measured."""

    def rows(self, report: Report, rows: list[Row]) -> None:
        """All rows of one size are there."""

    def end(self, report: Report) -> None:
        """After the last row."""

    def stop(self) -> None:
        """Whatever happened, nothing will follow."""


def run(options: Options, listener: Listener) -> Report:
    """Measure on this rank, with all others; torch.distributed is initialised."""
    ranks = dist.get_world_size()
    if options.root is not None and options.root >= ranks:
        raise ValueError(f"-r {options.root}: there are only {ranks} ranks")
    for schedule in (variant.schedule for variant in options.variants):
        if schedule is not None and schedule.ranks != ranks:
            raise ValueError(f"--schedule: is for {schedule.ranks} ranks, there are {ranks}")
    # Threads inherit the core: those of the backends we compare with start before it is set, so that they keep
    # the freedom that they are used to; ours start on it, where they measure the cores' distance.
    backends = _backends(options, plain=True)
    device = perf_host.pin(options.pin)
    backends |= _backends(options, plain=False)
    report = Report(options=options, ranks=perf_host.ranks(device))
    try:
        return _run(options, listener, report, backends)
    finally:
        listener.stop()
        for backend in backends.values():
            backend.close()


def _run(options: Options, listener: Listener, report: Report, backends: dict[str, Backend]) -> Report:
    ranks = len(report.ranks)
    report.backends = {name: backends[name].describe() for name in options.backends}
    limit = _limit(options, report)
    groups = list(_groups(options, ranks, limit))
    listener.begin(report, sum(len(variants) for *_, variants in groups) * options.run_cycles)
    for cycle in itertools.count():
        if cycle >= options.run_cycles > 0:
            break
        for size, datatype, op, root, variants in groups:
            rows = []
            for variant in variants:
                listener.step(f"{size} {datatype} {variant}")
                rows.append(_row(options, backends[variant.backend], variant, size, datatype, op, root))
            rows = _compared(rows, options.compare)
            report.rows += rows
            listener.rows(report, rows)
    report.ended = time.time()
    listener.end(report)
    return report


def _limit(options: Options, report: Report) -> int:
    """The largest size for which there is memory: tensors, what is expected, and the copies in between."""
    copies = 4 + min(options.agg_iters, BUFFERS_IN_FLIGHT)
    limit = perf_host.memory(report.ranks) // copies
    if options.maxbytes > limit:
        report.warnings.append(
            f"sizes over {limit} bytes are left out: {copies} tensors on each rank would not fit into free memory"
        )
    if options.minbytes > limit:
        raise ValueError(f"-b {options.minbytes}: {report.warnings[-1]}")
    return limit


def _backends(options: Options, plain: bool) -> dict[str, Backend]:
    found = {name: perf_backends.find(name) for name in options.backends}
    return {name: make(options.timeout) for name, make in found.items() if make.plain == plain}


def _groups(options: Options, ranks: int, limit: int) -> Iterator[tuple[int, str, str, int, list[Variant]]]:
    rooted = COLLECTIVES[options.collective].rooted
    roots = [-1] if not rooted else range(ranks) if options.root is None else [options.root]
    for datatype, op, root in itertools.product(options.datatypes, options.ops, roots):
        variants = [variant for variant in options.variants if variant.refusal(datatype, op) is None]
        for size in options.sizes if variants else ():
            if size <= limit:
                yield size, datatype, op, root, variants


def _row(
    options: Options, backend: Backend, variant: Variant, size: int, datatype: str, op: str, root: int
) -> Row:
    collective, dtype = COLLECTIVES[options.collective], DTYPES[datatype]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = collective.count(size, dtype, ranks)
    case = Case(
        collective=options.collective,
        count=count,
        dtype=dtype,
        op=op,
        root=max(root, 0),
        rank=rank,
        ranks=ranks,
    )
    out_of_place = in_place = wire_bytes = None
    if backend.measures:
        times = backend.times(case, options.iters, options.warmup_iters)
        measured = Measurement(timing=perf_measure.summary(times, 1, options.average), verdict=None)
        # One of the two is what its API is for.
        out_of_place, in_place = (None, measured) if collective.whole_in_place else (measured, None)
    else:
        bench = _Bench(options, backend, variant, case)
        if options.out_of_place or collective.separate:
            out_of_place = bench.measure(in_place=False)
        in_place = None if collective.separate else bench.measure(in_place=True)
        wire_bytes = bench.wire_bytes()
    return Row(
        size=collective.size(count, dtype, ranks),
        count=count,
        datatype=datatype,
        op=op,
        root=root,
        variant=variant,
        wire_bytes=wire_bytes,
        out_of_place=out_of_place,
        in_place=in_place,
    )


class _Bench:
    """One case on one backend, with the tensors for it."""

    def __init__(self, options: Options, backend: Backend, variant: Variant, case: Case) -> None:
        self._options, self._backend, self._variant, self._case = options, backend, variant, case
        self._values = values_for(variant, case.dtype)
        # What is timed looks like gradients; what is checked may have to be made so that sums are exact.
        self._timed_values = exact.normal if case.dtype.is_floating_point else exact.integers
        self._source = case.inputs(0, self._timed_values)
        buffers = min(options.agg_iters, BUFFERS_IN_FLIGHT)
        self._buffers = [self._buffer() for _ in range(buffers)]

    def measure(self, in_place: bool) -> Measurement:
        options, case = self._options, self._case
        calls = [self._call(buffer, in_place) for buffer in self._buffers]
        many = options.agg_iters
        repeats = -(-many // len(calls))  # of one tensor, in one iteration
        safe = max(1, perf_measure.safe_calls(case.dtype, case.op, case.ranks) // repeats)
        run = self._backend.operation(calls[0]) if many == 1 else self._several(calls, many)
        times = perf_measure.time_iterations(
            run,
            (lambda: self._refill(calls)) if in_place else lambda: None,
            iters=options.iters,
            warmup=options.warmup_iters,
            safe=safe if in_place else options.iters + options.warmup_iters + 1,
            blocking=options.blocking > 0,
            cpu=options.report_cputime,
        )
        timing = perf_measure.together(times, many, options.average)
        return Measurement(timing=timing, verdict=self._checked(calls[0]))

    def wire_bytes(self) -> int | None:
        """Sent by the rank that sends most, where the backend counts."""
        call = self._call(self._buffers[0], in_place=not COLLECTIVES[self._case.collective].separate)
        self._refill([call])
        work = self._backend.operation(call, asynchronous=True)()
        work.wait()
        seen: list[Any] = [None] * self._case.ranks
        dist.all_gather_object(seen, getattr(work, "wire_bytes", None))
        return None if None in seen else max(seen)

    def _buffer(self) -> torch.Tensor:
        shards = self._case.ranks if COLLECTIVES[self._case.collective].shards else 1
        return torch.empty(self._case.count * shards, dtype=self._case.dtype)

    def _call(self, buffer: torch.Tensor, in_place: bool) -> Call:
        case = self._case
        output, source = buffer, self._source
        mine = slice(case.rank * case.count, (case.rank + 1) * case.count)
        if case.collective in ("reduce_scatter", "scatter"):
            # Out of place, the other shards of the buffer stay unused.
            output, source = buffer[mine], buffer if in_place else self._source
        elif in_place:
            source = buffer[mine] if case.collective in ("all_gather", "gather") else buffer
        return Call(
            collective=case.collective,
            output=output,
            input=source,
            op=case.op,
            root=case.root,
            codec=self._variant.codec,
            algorithm=self._variant.algorithm,
            schedule=self._variant.schedule,
        )

    def _refill(self, calls: list[Call]) -> None:
        for call in calls:
            if call.input is not self._source:
                call.input.copy_(self._source)

    def _several(self, calls: list[Call], many: int) -> Callable[[], None]:
        starts = [self._backend.operation(call, asynchronous=True) for call in calls]
        order = [starts[index % len(starts)] for index in range(many)]

        def run() -> None:
            works = [start() for start in order]
            for work in works:
                work.wait()

        return run

    def _checked(self, call: Call) -> Verdict | None:
        verdicts = []
        for seed in range(1, self._options.check + 1):
            call.input.copy_(self._case.inputs(seed, self._values))
            self._backend.operation(call)()
            verdicts.append(judge(call.output, self._case, self._variant, seed))
            if call.input is self._source:
                self._source.copy_(self._case.inputs(0, self._timed_values))
        return _combined(verdicts) if verdicts else None


def _combined(mine: list[Verdict]) -> Verdict:
    """The verdicts of all checks on all ranks as one."""
    everyone: list[list[Verdict]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    verdicts = [verdict for theirs in everyone for verdict in theirs]
    largest = [verdict.max_error for verdict in verdicts if verdict.max_error is not None]
    means = [verdict.mean_error for verdict in verdicts if verdict.mean_error is not None]
    return Verdict(
        wrong=sum(verdict.wrong for verdict in verdicts),
        max_error=max(largest) if largest else None,
        mean_error=max(means) if means else None,
    )


def _compared(rows: list[Row], peers: tuple[str, ...]) -> list[Row]:
    """With each row's ratios: the reference's and every peer's median time over its own."""
    if len(rows) < 2:
        return rows
    reference = next((row for row in rows if row.variant.backend == "gloo"), rows[-1])
    beside = {peer: next((row for row in rows if row.variant.backend == peer), None) for peer in peers}
    compared = []
    for row in rows:
        ratios = {peer: _ratio(theirs, row) for peer, theirs in beside.items() if theirs is not None}
        known = {peer: ratio for peer, ratio in ratios.items() if ratio is not None}
        compared.append(replace(row, ratio=_ratio(reference, row), ratios=known))
    return compared


def _ratio(reference: Row, row: Row) -> float | None:
    """Of what both were measured in: in place where they can be."""
    for theirs, ours in ((reference.in_place, row.in_place), (reference.out_of_place, row.out_of_place)):
        if theirs is not None and ours is not None:
            own = ours.timing.statistics.p50
            return theirs.timing.statistics.p50 / own if own > 0 else None
    return None
