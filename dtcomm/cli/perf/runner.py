"""What one rank of ``dtcomm perf`` does: measure and check every size, type and variant in turn.

`run` is the entry point on every rank. It calls `_measure_row` for each line of the table; `CaseBench` times and checks
one case on one backend. The result is a `PerfReport`; a `ProgressListener` displays rows while they are measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtcomm import measure as device_info
from dtcomm.cli.perf import placement, timing
from dtcomm.cli.perf.args import PerfOptions, Variant
from dtcomm.cli.perf.backend import Backend, CollectiveCall, TransportUsed
from dtcomm.cli.perf.collectives import COLLECTIVES, DTYPES, Collective, bandwidths
from dtcomm.cli.perf.libraries import find_backend
from dtcomm.cli.perf.placement import Placement, RankInfo
from dtcomm.cli.perf.timing import Timing
from dtcomm.cli.perf.verify import (
    Case,
    CheckResult,
    check_result,
    check_values,
    combine_results,
    equal_on_all_ranks,
)
from dtcomm.compress.checkpoint import gather
from dtcomm.measure import exact_inputs

SETTLING_CALLS, MAX_SETTLING_ROUNDS = 10, 50
MAX_BUFFERS = 4  # with a larger -m, operations reuse these buffers in turn


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One timed and checked operation; ``check`` is summed over the ranks, None with -c 0."""

    timing: Timing
    check: CheckResult | None


@dataclass(frozen=True, kw_only=True)
class PerfRow:
    """One line of the table.

    ``wire_bytes`` is that of the rank that sends most, or None if the backend does not count. ``ratio`` and ``ratios``
    (by the names of --compare) are the reference's and the peers' median times over this row's.
    """

    size: int
    count: int
    datatype: str
    op: str
    root: int
    variant: Variant
    wire_bytes: int | None
    out_of_place: Measurement | None
    in_place: Measurement | None
    transport: TransportUsed | None = None
    ratio: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def primary(self) -> Measurement:
        """The measurement that ratios refer to: in place if there is one."""
        measurement = self.in_place or self.out_of_place
        assert measurement is not None
        return measurement

    @property
    def checks(self) -> list[CheckResult]:
        """The check results out of place and in place, if there are any."""
        measurements = (self.out_of_place, self.in_place)
        return [m.check for m in measurements if m is not None and m.check is not None]


@dataclass(kw_only=True)
class PerfReport:
    """All results; equal on all ranks, times included."""

    options: PerfOptions
    ranks: list[RankInfo]
    backends: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=device_info.versions)
    warnings: list[str] = field(default_factory=list)
    rows: list[PerfRow] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    ended: float = 0.0

    @property
    def wrong(self) -> int:
        """Number of wrong elements in all rows."""
        return sum(check.wrong for row in self.rows for check in row.checks)


class ProgressListener:
    """Notified while the benchmark runs; rank 0's listener prints the table."""

    def begin(self, report: PerfReport, steps: int) -> None:
        """Called before the first row; ``steps`` rows will follow, 0 if unknown."""

    def step(self, description: str) -> None:
        """Called before a row is measured."""

    def rows(self, report: PerfReport, rows: list[PerfRow]) -> None:
        """Called when all rows of one size have been measured."""

    def end(self, report: PerfReport) -> None:
        """Called after the last row."""

    def stop(self) -> None:
        """Called at the end, also after a failure."""


def with_ratios(rows: list[PerfRow], peers: tuple[str, ...]) -> list[PerfRow]:
    """Return the rows of one size with their ratios; the reference is gloo if measured, else the last row."""
    if len(rows) < 2:
        return rows
    by_backend: dict[str, PerfRow] = {}
    for row in rows:
        by_backend.setdefault(row.variant.backend, row)
    reference = by_backend.get("gloo", rows[-1])
    result = []
    for row in rows:
        ratios = {peer: _ratio(by_backend[peer], row) for peer in peers if peer in by_backend}
        known = {peer: ratio for peer, ratio in ratios.items() if ratio is not None}
        result.append(replace(row, ratio=_ratio(reference, row), ratios=known))
    return result


def _ratio(reference: PerfRow, row: PerfRow) -> float | None:
    """Return the ratio of median times, in place if both rows have that."""
    for theirs, ours in ((reference.in_place, row.in_place), (reference.out_of_place, row.out_of_place)):
        if theirs is not None and ours is not None:
            median = ours.timing.statistics.p50
            return theirs.timing.statistics.p50 / median if median > 0 else None
    return None


def unexpected_transports(report: PerfReport) -> list[tuple[str, TransportUsed]]:
    """Return each variant's unexpected transports, without duplicates."""
    transports = [
        (str(row.variant), row.transport)
        for row in report.rows
        if row.transport is not None and row.transport.reason
    ]
    return list(dict.fromkeys(transports)) if report.options.on_device else []


def average_bandwidths(report: PerfReport) -> dict[str, float]:
    """Return each variant's mean busbw in GB/s over sizes, out of place and in place."""
    by_variant: dict[str, list[float]] = {}
    collective = COLLECTIVES[report.options.collective]
    for row in report.rows:
        for measured in (row.out_of_place, row.in_place):
            if measured is not None:
                _, bus = bandwidths(collective, row.size, measured.timing.seconds, len(report.ranks))
                by_variant.setdefault(str(row.variant), []).append(bus)
    return {variant: sum(values) / len(values) for variant, values in by_variant.items()}


class RowGroup(NamedTuple):
    """Rows that are measured and compared together: one for each variant."""

    size: int
    datatype: str
    op: str
    root: int
    variants: list[Variant]

    def case(self, collective: Collective, rank: int, ranks: int) -> Case:
        """Return this group's collective on one rank."""
        dtype = DTYPES[self.datatype]
        return Case(
            collective=collective.name,
            count=collective.count(self.size, dtype, ranks),
            dtype=dtype,
            op=self.op,
            root=max(self.root, 0),
            rank=rank,
            ranks=ranks,
        )


def run(options: PerfOptions, listener: ProgressListener, place: Placement | None = None) -> PerfReport:
    """Measure on this rank; all ranks must call it after torch.distributed is initialized.

    ``place`` is by default the placement that the options name.
    """
    ranks = dist.get_world_size()
    if options.root is not None and options.root >= ranks:
        raise ValueError(f"-r {options.root}: there are only {ranks} ranks")
    place = place or placement.place_rank(options.device)
    # Threads inherit the core of the thread that starts them. The peers' backends are created before pinning, so that
    # their threads stay free as usual; dtcomm's are created after it, since they measure the distance of the cores.
    backends = _create_backends(options, place, supports_codecs=False)
    device = place.pin(options.pin)
    backends |= _create_backends(options, place, supports_codecs=True)
    report = PerfReport(
        options=options, ranks=placement.gather_rank_info(device), gpus=placement.gather_gpus(place)
    )
    if place.shared_gpu:
        report.warnings.append(f"{place.shared_gpu}: NCCL is unavailable and their kernels are serialised")
    try:
        report.backends = {name: backends[name].describe() for name in options.backends}
        for name, backend in backends.items():
            if options.cudagraph and (reason := backend.why_no_cuda_graph()):
                raise ValueError(f"-G {options.cudagraph}: --backend {name}: {reason}")
        limit = size_limit(options, report, placement.memory_per_rank(place, report.ranks))
        groups = list(row_groups(options, ranks, limit))
        listener.begin(report, sum(len(group.variants) for group in groups) * options.run_cycles)
        for cycle in itertools.count():
            if cycle >= options.run_cycles > 0:
                break
            for group in groups:
                rows = []
                for variant in group.variants:
                    listener.step(f"{group.size} {group.datatype} {variant}")
                    rows.append(_measure_row(options, backends[variant.backend], variant, group))
                rows = with_ratios(rows, options.compare)
                report.rows += rows
                listener.rows(report, rows)
        report.ended = time.time()
        listener.end(report)
        return report
    finally:
        listener.stop()


def size_limit(options: PerfOptions, report: PerfReport, free: int) -> int:
    """Return the largest size for which memory suffices: tensors, expected results and temporary copies.

    ``free`` is what each rank may use. ValueError if no size fits.
    """
    copies = 4 + min(options.agg_iters, MAX_BUFFERS)
    limit = free // copies
    if options.maxbytes > limit:
        report.warnings.append(
            f"sizes over {limit} bytes are left out: {copies} tensors on each rank would not fit into free memory"
        )
    if options.minbytes > limit:
        raise ValueError(f"-b {options.minbytes}: {report.warnings[-1]}")
    return limit


def row_groups(options: PerfOptions, ranks: int, limit: int) -> Iterator[RowGroup]:
    """Yield every size up to ``limit``, type, operator and root, with the variants that support it."""
    rooted = COLLECTIVES[options.collective].rooted
    roots = [-1] if not rooted else range(ranks) if options.root is None else [options.root]
    for datatype, op, root in itertools.product(options.datatypes, options.ops, roots):
        variants = [
            variant
            for variant in options.variants
            if variant.why_unsupported(options.collective, datatype, op) is None
        ]
        for size in options.sizes if variants else ():
            if size <= limit:
                yield RowGroup(size, datatype, op, root, variants)


def _create_backends(options: PerfOptions, place: Placement, supports_codecs: bool) -> dict[str, Backend]:
    classes = {name: find_backend(name) for name in options.backends}
    return {
        name: backend(options.timeout, place)
        for name, backend in classes.items()
        if backend.supports_codecs == supports_codecs
    }


def _measure_row(options: PerfOptions, backend: Backend, variant: Variant, group: RowGroup) -> PerfRow:
    collective = COLLECTIVES[options.collective]
    case = group.case(collective, dist.get_rank(), dist.get_world_size())
    out_of_place = None
    bench = CaseBench(options, backend, variant, case)
    works_in_place = not collective.needs_two_tensors
    if options.out_of_place or not works_in_place:
        out_of_place = bench.measure(in_place=False)
    in_place = bench.measure(in_place=True) if works_in_place else None
    wire_bytes, transport = bench.measure_transport()
    return PerfRow(
        size=collective.size(case.count, case.dtype, case.ranks),
        count=case.count,
        datatype=group.datatype,
        op=group.op,
        root=group.root,
        variant=variant,
        wire_bytes=wire_bytes,
        out_of_place=out_of_place,
        in_place=in_place,
        transport=transport,
    )


class CaseBench:
    """One case on one backend, with its tensors on this rank."""

    def __init__(self, options: PerfOptions, backend: Backend, variant: Variant, case: Case) -> None:
        self._options, self._backend, self._variant, self._case = options, backend, variant, case
        self._clock = backend.place.clock(options.report_cputime)
        # Timed inputs resemble gradients; checked inputs may have to be such that sums are exact.
        self._check_values = check_values(variant, case.dtype)
        self._timed_values = timed_values(case.dtype)
        inputs = case.inputs(0, self._timed_values)
        self._source = backend.empty(inputs.numel(), case.dtype).copy_(inputs)
        buffers = min(options.agg_iters, MAX_BUFFERS)
        self._buffers = [backend.empty(case.buffer_numel, case.dtype) for _ in range(buffers)]

    def measure(self, in_place: bool) -> Measurement:
        """Time and check the case."""
        options, case = self._options, self._case
        calls = [self._call(buffer, in_place) for buffer in self._buffers]
        together = options.agg_iters
        calls_per_buffer = -(-together // len(calls))  # in one iteration
        run = self._backend.bind_with_copy(calls[0]) if together == 1 else self._bind_several(calls, together)
        if options.warmup_iters:
            self._settle(run, calls)
        measured = timing.time_operation(
            options,
            run,
            (lambda: self._refill(calls)) if in_place else None,
            self._clock,
            dist.barrier,
            safe=max(1, timing.calls_before_overflow(case.dtype, case.op, case.ranks) // calls_per_buffer),
        )
        return Measurement(timing=measured, check=self._check(calls[0]))

    def _settle(self, run: Callable[[], Any], calls: list[CollectiveCall]) -> None:
        """Repeat the operation until the backend has chosen how to carry it out, which all ranks know alike."""
        run()
        for _ in range(MAX_SETTLING_ROUNDS):
            if self._backend.settled():
                return
            self._refill(calls)
            for _ in range(SETTLING_CALLS):
                run()

    def measure_transport(self) -> tuple[int | None, TransportUsed]:
        """Return the bytes sent by the rank that sends most, if the backend counts them, and what moved them."""
        in_place = not COLLECTIVES[self._case.collective].needs_two_tensors
        call = self._call(self._buffers[0], in_place)
        self._refill([call])
        before = self._backend.transport_snapshot()
        work = self._backend.bind_with_copy(call, asynchronous=True)()
        work.wait()
        # Handles of torch, and a composite of them, have no such attribute.
        wire_bytes: list[Any] = gather(getattr(work, "wire_bytes", None))
        return None if None in wire_bytes else max(wire_bytes), self._backend.transport_used(before)

    def _call(self, buffer: torch.Tensor, in_place: bool) -> CollectiveCall:
        case, variant = self._case, self._variant
        output, source = case.output_and_input(buffer, self._source, in_place)
        return CollectiveCall(
            collective=case.collective,
            output=output,
            input=source,
            op=case.op,
            root=case.root,
            codec=variant.codec,
            algorithm=variant.algorithm,
        )

    def _refill(self, calls: list[CollectiveCall]) -> None:
        for call in calls:
            if call.input is not self._source:
                call.input.copy_(self._source)

    def _bind_several(self, calls: list[CollectiveCall], together: int) -> Callable[[], None]:
        """Return a function that starts ``together`` operations, on the calls in turn, and waits for all."""
        starts = [self._backend.bind_with_copy(call, asynchronous=True) for call in calls]
        order = [starts[index % len(starts)] for index in range(together)]

        def run() -> None:
            works = [start() for start in order]
            for work in works:
                work.wait()

        return run

    def _check(self, call: CollectiveCall) -> CheckResult | None:
        """Check the call -c times with new values and combine the results of all ranks."""
        checks = []
        for seed in range(1, self._options.check + 1):
            call.input.copy_(self._case.inputs(seed, self._check_values))
            self._backend.bind_with_copy(call)()
            checks.append(check_result(call.output, self._case, self._variant, seed, equal_on_all_ranks))
            if call.input is self._source:
                self._source.copy_(self._case.inputs(0, self._timed_values))
        if not checks:
            return None
        return combine_results([check for rank_checks in gather(checks) for check in rank_checks])


def timed_values(dtype: torch.dtype) -> exact_inputs.ValueSource:
    """Return the values that are timed: normally distributed, or integers for an integer type."""
    return exact_inputs.normal if dtype.is_floating_point else exact_inputs.integers
