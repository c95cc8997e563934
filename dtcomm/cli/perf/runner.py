"""What one rank does: every size, type and variant in turn, timed and checked, with rank 0 telling the story."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from dtcomm.cli.perf import host, placement, timing
from dtcomm.cli.perf.backends import registry
from dtcomm.cli.perf.backends.base import Backend
from dtcomm.cli.perf.bench import BUFFERS_IN_FLIGHT, Bench
from dtcomm.cli.perf.collectives import COLLECTIVES, DTYPES
from dtcomm.cli.perf.options import Options, Variant
from dtcomm.cli.perf.placement import Place
from dtcomm.cli.perf.report import Listener, Measurement, Report, Row, compared
from dtcomm.cli.perf.verify import Case

Group = tuple[int, str, str, int, list[Variant]]  # size, type, operator, root, and who does it


def run(options: Options, listener: Listener, place: Place | None = None) -> Report:
    """Measure on this rank, with all others; torch.distributed is initialised. ``place``: by default the options'."""
    ranks = dist.get_world_size()
    if options.root is not None and options.root >= ranks:
        raise ValueError(f"-r {options.root}: there are only {ranks} ranks")
    for schedule in (variant.schedule for variant in options.variants):
        if schedule is not None and schedule.ranks != ranks:
            raise ValueError(f"--schedule: is for {schedule.ranks} ranks, there are {ranks}")
    place = place or placement.take(options.device)
    # Threads inherit the core: those of the backends we compare with start before it is set, so that they keep
    # the freedom that they are used to; ours start on it, where they measure the cores' distance.
    backends = _backends(options, place, plain=True)
    device = place.pin(options.pin)
    backends |= _backends(options, place, plain=False)
    report = Report(options=options, ranks=host.ranks(device), gpus=placement.gpus(place))
    if place.shared:
        report.warnings.append(
            f"{place.shared}: no NCCL there, and kernels of theirs take turns; --virtual N measures fused kernels alone"
        )
    try:
        return _run(options, listener, report, backends, place)
    finally:
        listener.stop()
        for backend in backends.values():
            backend.close()


def _run(
    options: Options, listener: Listener, report: Report, backends: dict[str, Backend], place: Place
) -> Report:
    report.backends = {name: backends[name].describe() for name in options.backends}
    for name, backend in backends.items():
        if options.cudagraph and (reason := backend.why_no_graph()):
            raise ValueError(f"-G {options.cudagraph}: --backend {name}: {reason}")
    limit = limited(options, report, min(host.memory(report.ranks), _share(place)))
    return rounds(
        options,
        listener,
        report,
        groups(options, len(report.ranks), limit),
        lambda variant, *what: _row(options, backends[variant.backend], variant, *what),
    )


def rounds(
    options: Options,
    listener: Listener,
    report: Report,
    what: Iterator[Group],
    measure: Callable[[Variant, int, str, str, int], Row],
) -> Report:
    """Fill the report: ``measure`` makes a row of (variant, size, type, operator, root)."""
    listed = list(what)
    listener.begin(report, sum(len(variants) for *_, variants in listed) * options.run_cycles)
    for cycle in itertools.count():
        if cycle >= options.run_cycles > 0:
            break
        for size, datatype, op, root, variants in listed:
            rows = []
            for variant in variants:
                listener.step(f"{size} {datatype} {variant}")
                rows.append(measure(variant, size, datatype, op, root))
            rows = compared(rows, options.compare)
            report.rows += rows
            listener.rows(report, rows)
    report.ended = time.time()
    listener.end(report)
    return report


def limited(options: Options, report: Report, free: int) -> int:
    """The largest size for which there is memory: tensors, what is expected, and the copies in between.

    ``free`` is what each rank may use; ValueError where no size fits.
    """
    copies = 4 + min(options.agg_iters, BUFFERS_IN_FLIGHT)
    limit = free // copies
    if options.maxbytes > limit:
        report.warnings.append(
            f"sizes over {limit} bytes are left out: {copies} tensors on each rank would not fit into free memory"
        )
    if options.minbytes > limit:
        raise ValueError(f"-b {options.minbytes}: {report.warnings[-1]}")
    return limit


def groups(options: Options, ranks: int, limit: int) -> Iterator[Group]:
    """What is measured together: every size, type, operator and root with the variants that can do it."""
    rooted = COLLECTIVES[options.collective].rooted
    roots = [-1] if not rooted else range(ranks) if options.root is None else [options.root]
    for datatype, op, root in itertools.product(options.datatypes, options.ops, roots):
        variants = [variant for variant in options.variants if options.refusal(variant, datatype, op) is None]
        for size in options.sizes if variants else ():
            if size <= limit:
                yield size, datatype, op, root, variants


def _share(place: Place) -> int:
    """Bytes of its device that every rank may use: what the rank has that has least."""
    shares = [0] * dist.get_world_size()
    dist.all_gather_object(shares, int(0.8 * place.free()))
    return min(shares)


def _backends(options: Options, place: Place, plain: bool) -> dict[str, Backend]:
    found = {name: registry.find(name) for name in options.backends}
    return {name: make(options.timeout, place) for name, make in found.items() if make.plain == plain}


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
        measured = Measurement(timing=timing.summary(times, 1, options.average), verdict=None)
        # One of the two is what its API is for.
        out_of_place, in_place = (None, measured) if collective.whole_in_place else (measured, None)
        moved = backend.moved(None)
    else:
        bench = Bench(options, backend, variant, case)
        works_in_place = backend.in_place and not collective.separate
        if options.out_of_place or not works_in_place:
            out_of_place = bench.measure(in_place=False)
        in_place = bench.measure(in_place=True) if works_in_place else None
        wire_bytes, moved = bench.wire()
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
        moved=moved,
    )
