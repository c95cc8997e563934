"""Compare every collective of dtcomm with Gloo and with the faster of two settings of Open MPI in one run.

python -m bench.collectives [--ranks 2 4] [--sizes 1K 64M] [--collectives NAMES] [--quick] [--json FILE]

The data are fp32, sums, root 0. A size is that of all shards together if every rank has one, as in nccl-tests.
all_reduce, broadcast and reduce work in place, the others out of place. gather and scatter use one tensor for all
shards (for Gloo a list, which is all it supports). sendrecv sends from every rank to the next; pingpong alternates
between two ranks. Contestants take turns within every repetition; figures are medians of the slowest rank. The floor
is the time in which all ranks at once copy, in private memory, an equal share of the bytes that must be read and
written at least. dtcomm's calls are repeated before until its first trials of variants are over. A target is also met
within 10 % of the floor. The exit status is 1 if a result is wrong; a missed target is printed and not an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from bench.common import machine, native, output, pages
from bench.common.collective_rank import PINGPONG, CollectiveRank
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.targets import KB, MB
from bench.common.torch_rank import new_store_file
from bench.common.turns import in_turn
from bench.common.yard_rank import YardRank
from dtcomm.cli.perf.backends import mpi
from dtcomm.cli.perf.collectives import COLLECTIVES

SIZES = [KB, 64 * KB, MB, 16 * MB, 64 * MB]
NAMES = (*COLLECTIVES, PINGPONG)
OURS = ("dtcomm", "dtcomm.empty")
PEERS = ("gloo", "mpi")
MPI_SETTINGS = ("default", "ob1")  # the faster one counts
NEAR_FLOOR = 0.9  # of the floor's speed; a collective that reaches it meets its targets
STREAMED = 4 * MB  # bytes from which a copy past the cache is the faster one
Measure = Callable[..., list[float]]


def required(collective: str, size: int, ours: str, peer: str) -> float | None:
    """Return how many times faster than the peer dtcomm must be; None: there is no target."""
    if ours != "dtcomm":
        return None
    if peer == "gloo":
        return 5.0
    return 1.5 if collective == "all_reduce" and size >= MB else 1.2


def least_copied(collective: str, ranks: int) -> float:
    """Return what each rank copies if all ranks share the copying, as a fraction of all shards together."""
    reads, writes = {
        "broadcast": (1, ranks - 1),
        "reduce": (ranks, 1),
        "reduce_scatter": (ranks, 1),
        "all_gather": (1, ranks),
        "gather": (1, 1),
        "scatter": (1, 1),
    }.get(collective, (ranks, ranks))
    return (reads + writes) / 2 / ranks


def floor(pool: Pool, ranks: int, collective: str, numel: int, warm: int, iters: int) -> list[float]:
    """Return the seconds of the copies on every rank; ``numel`` is that of a contestant."""
    shards = collective in COLLECTIVES and COLLECTIVES[collective].sharded
    share = int(numel * (ranks if shards else 1) * least_copied(collective, ranks))
    algorithm = native.STREAMING_COPY if share * 4 >= STREAMED else native.COPY
    settings = native.tuning(ranks=ranks).as_dict()
    return pool.call("measure", algorithm=algorithm, numel=share, settings=settings, warm=warm, iters=iters)


def start(stack: ExitStack, ranks: int, largest: int) -> tuple[dict[str, Measure], dict[str, Measure]]:
    """Start all ranks, which ``stack`` ends; return the functions that measure and those that check, by contestant."""
    measures: dict[str, Measure] = {}
    checks: dict[str, Measure] = {}
    for backend, pinned in (("native", True), ("gloo", False)):
        # Bound to one core, Gloo's caller and its I/O thread get in each other's way.
        pool = stack.enter_context(
            Pool(CollectiveRank, ranks, store_file=new_store_file(), backend=backend, pinned=pinned)
        )
        for shared in (False, True) if backend == "native" else (False,):
            name = "gloo" if backend == "gloo" else "dtcomm.empty" if shared else "dtcomm"
            measures[name] = partial(pool.call, "measure", shared=shared)
            checks[name] = partial(pool.call, "wrong", shared=shared)
    absent = mpi.why_unavailable()
    if absent:
        print(absent)
    else:
        for setting in MPI_SETTINGS:
            started = stack.enter_context(closing(mpi.MpiRanks(setting, ranks)))
            measures[f"mpi {setting}"] = partial(started.call, "measure")
    segment = stack.enter_context(closing(native.Segment.create(ranks, native.BOX_BYTES, largest)))
    copying = stack.enter_context(Pool(YardRank, ranks, address=segment.address, largest=largest))
    measures["floor"] = partial(floor, copying, ranks)
    return measures, checks


def measure(
    measures: dict[str, Measure], collective: str, numel: int, repetitions: int, budget: float
) -> dict[str, list[float]]:
    """Return the seconds of a call on the slowest rank, by contestant and repetition; contestants take turns."""
    iters: dict[str, int] = {}
    for name, call in measures.items():
        iters[name] = iterations(max(call(collective=collective, numel=numel, warm=2, iters=1)), budget)
    times: dict[str, list[float]] = {name: [] for name in measures}
    for repetition in range(repetitions):
        for name, call in in_turn(list(measures.items()), repetition):
            times[name].append(max(call(collective=collective, numel=numel, warm=1, iters=iters[name])))
    return times


def row_of(
    ranks: int,
    collective: str,
    size: int,
    measures: dict[str, Measure],
    checks: dict[str, Measure],
    quick: bool,
) -> dict[str, Any]:
    """Measure one collective at one size: timings, ratios and verdicts."""
    shards = collective in COLLECTIVES and COLLECTIVES[collective].sharded
    numel = size // 4 // (ranks if shards else 1)
    wrong = {
        name: max(check(collective=collective, numel=numel))
        for name, check in checks.items()
        if name != "gloo"
    }
    repetitions, budget = (5, 0.01) if quick else (7, 0.02)
    times, conditions = machine.steady(
        partial(measure, measures, collective, numel, repetitions, budget), attempts=1 if quick else 2
    )
    timings = {name: Timing.of(series) for name, series in times.items()}
    of_mpi = [timings.pop(name) for name in list(timings) if name.startswith("mpi ")]
    if of_mpi:
        timings["mpi"] = min(of_mpi, key=lambda timing: timing.median)
    figures = []
    for ours in ("dtcomm", "dtcomm.empty"):
        for peer in PEERS:
            if peer not in timings:
                continue
            ratio = timings[peer].median / timings[ours].median
            least = required(collective, size, ours, peer)
            at_floor = timings["floor"].median >= NEAR_FLOOR * timings[ours].median
            verdict = None if least is None else "PASS" if ratio >= least or at_floor else "MISS"
            figures.append(
                {"ours": ours, "peer": peer, "ratio": round(ratio, 3), "target": least, "verdict": verdict}
            )
    return {
        "ranks": ranks,
        "collective": collective,
        "bytes": size,
        **conditions,
        "wrong": wrong,
        "contestants": {name: timing.as_dict() for name, timing in timings.items()},
        "figures": figures,
    }


def show(rows: list[dict[str, Any]], ranks: int) -> None:
    """Print the microseconds of all contestants and dtcomm's ratios, with marks at missed targets."""
    lines = []
    for row in rows:
        timings = row["contestants"]
        cells = [row["collective"], output.size_name(row["bytes"])]
        cells += [
            output.microseconds(timings[name]["median_us"] / 1e6) if name in timings else "-"
            for name in ("dtcomm", "dtcomm.empty", *PEERS)
        ]
        ratios = {(f["ours"], f["peer"]): f for f in row["figures"]}
        for key in (("dtcomm", "gloo"), ("dtcomm", "mpi"), ("dtcomm.empty", "mpi")):
            figure = ratios.get(key)
            missed = figure is not None and figure["verdict"] == "MISS"
            cells.append("-" if figure is None else f"{figure['ratio']:.2f}x{' !' if missed else ''}")
        ours = [timings[name]["median_us"] for name in ("dtcomm", "dtcomm.empty")]
        lines.append([*cells, *(f"{timings['floor']['median_us'] / median_us:.0%}" for median_us in ours)])
    columns = ["collective", "size", "dtcomm µs", "empty µs", "gloo µs", "mpi µs"]
    output.table(
        f"fp32, {ranks} ranks (! misses its target)",
        [*columns, "vs gloo", "vs mpi", "empty vs mpi", "of floor", "empty of floor"],
        lines,
    )


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/collectives.md: microseconds, and how many times longer the peers take."""
    lines = []
    for row in result["rows"]:
        times = {name: timing["median_us"] for name, timing in row["contestants"].items()}
        cells = [f"{row['collective']}, {output.size_name(row['bytes'])}, {row['ranks']} ranks"]
        cells += [_microseconds(row["contestants"][ours]) if ours in times else "" for ours in OURS]
        for peer in PEERS:
            ratio = times[peer] / times["dtcomm"] if peer in times else None
            cells.append("" if ratio is None else f"{output.microseconds(times[peer] / 1e6)} ({ratio:.2f}×)")
        lines.append(cells)
    return pages.markdown(["µs", "dtcomm", "`dtcomm.empty`", "Gloo", "Open MPI"], lines, aligned=True)


def _microseconds(timing: dict[str, Any]) -> str:
    """Return the median, and the range over runs if there are several."""
    shown = pages.spread(timing, "median_us", lambda us: output.microseconds(us / 1e6))
    return output.microseconds(timing["median_us"] / 1e6) + shown


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=output.parse_size, nargs="+", default=SIZES)
    parser.add_argument("--collectives", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repetitions")
    parser.add_argument("--json", help="where to write instead of bench/results/collectives.json")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        rows_of_count: list[dict[str, Any]] = []
        with ExitStack() as stack:
            measures, checks = start(stack, ranks, max(options.sizes))
            for collective in options.collectives:
                for size in options.sizes:
                    rows_of_count.append(row_of(ranks, collective, size, measures, checks, options.quick))
        show(rows_of_count, ranks)
        rows += rows_of_count
    figures = [figure for row in rows for figure in row["figures"] if figure["verdict"]]
    missed = sum(figure["verdict"] == "MISS" for figure in figures)
    print(f"{len(figures)} targets, {missed} missed")
    result = {"machine": machine.describe(), "quick": options.quick, "rows": rows}
    print(output.write("collectives", result, options.json))
    return result


if __name__ == "__main__":
    bad = [row for row in main()["rows"] if any(row["wrong"].values())]
    sys.exit(
        f"wrong results: {[(row['collective'], row['bytes'], row['wrong']) for row in bad]}" if bad else 0
    )
