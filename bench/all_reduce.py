"""Compare dtcomm.all_reduce with Gloo, Open MPI, DeepSpeed, oneCCL, a hand-written all-reduce and the memory floor.

python -m bench.all_reduce [--ranks 2 4] [--sizes 1K 64M] [--dtype bfloat16] [--quick] [--only gloo] [--json FILE]

The operation is a sum in place, in fp32 if not told otherwise; Open MPI, the hand-written one and the floor know fp32
only. Contestants take turns within every repetition; figures are medians of the
slowest rank. The exit status is 1 if a result is wrong. A missed target is printed and not an error, since machines
differ.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.common import machine, native, oneccl_rank, output
from bench.common.native import Segment, tuning
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.targets import KB, MB, all_reduce_targets, judge
from bench.common.torch_rank import DeepSpeedRank, TorchRank, new_store_file, why_no_deepspeed
from bench.common.turns import in_turn
from bench.common.yard_rank import YardRank
from dtcomm.cli.perf.backends import mpi

SIZES = {2: [KB, 64 * KB, MB, 16 * MB, 64 * MB, 256 * MB], 4: [KB, 64 * KB, MB, 16 * MB, 64 * MB]}
RING = 8 * MB
FAMILIES = [
    "dtcomm",
    "dtcomm.empty",
    "gloo",
    "mpi",
    "deepspeed",
    "oneccl",
    "yardstick",
    "yardstick, in segment",
    "floor",
]
GROUPS = ("dtcomm", "gloo", "mpi", "deepspeed", "oneccl", "yardstick")
FP32_ONLY = ("mpi", "yardstick")
Measure = Callable[..., list[Any]]
Checks = list[tuple[str, Measure]]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """An implementation; ``call(numel=, warm=, iters=)`` returns the seconds of every rank.

    The fastest variant of a family represents the family.
    """

    family: str
    variant: str
    call: Measure
    largest: int = 1 << 62


def yardsticks(pool: Pool, ranks: int) -> list[Contestant]:
    """Return the settings that were fastest at some size in a sweep, and the memory floor."""
    settings = {
        "one-shot": (native.ONE_SHOT, tuning(ranks=ranks), 128 * KB),
        "one-shot, non-temporal": (native.ONE_SHOT, tuning(ranks=ranks, stream_stage=1), 128 * KB),
        "two-shot 1 MB x 2": (native.TWO_SHOT, tuning(MB, 2, ranks=ranks), 4 * MB),
        "two-shot 256 KB x 4": (native.TWO_SHOT, tuning(256 * KB, 4, ranks=ranks), 1 << 40),
        "two-shot 256 KB x 8": (native.TWO_SHOT, tuning(256 * KB, 8, ranks=ranks), 1 << 40),
        "two-shot 512 KB x 4, result non-temporal": (
            native.TWO_SHOT,
            tuning(512 * KB, 4, ranks=ranks, stream_result=1),
            1 << 40,
        ),
        "two-shot 256 KB x 4, staging non-temporal": (
            native.TWO_SHOT,
            tuning(256 * KB, 4, ranks=ranks, stream_stage=1, stream_slot=1),
            1 << 40,
        ),
    }
    contestants = [
        Contestant(family="yardstick", variant=name, call=_yard(pool, algorithm, settings), largest=largest)
        for name, (algorithm, settings, largest) in settings.items()
    ]
    for family, variant, algorithm in (
        ("yardstick, in segment", "direct", native.DIRECT),
        ("floor", "copy", native.COPY),
        ("floor", "non-temporal copy", native.STREAMING_COPY),
        ("floor", "in place", native.UPDATE),
    ):
        call = _yard(pool, algorithm, tuning(ranks=ranks))
        contestants.append(Contestant(family=family, variant=variant, call=call))
    return contestants


def _yard(pool: Pool, algorithm: int, settings: native.Tuning) -> Measure:
    return partial(pool.call, "measure", algorithm=algorithm, settings=settings.as_dict())


def contestants(
    stack: ExitStack, ranks: int, largest: int, only: list[str], dtype: str = "float32"
) -> tuple[list[Contestant], Checks]:
    """Start the ranks of the contestants in ``only``, which ``stack`` ends; return the contestants and the checks."""
    entries: list[Contestant] = []
    checks: Checks = []
    if "dtcomm" in only:
        pool = stack.enter_context(Pool(TorchRank, ranks, store_file=new_store_file(), dtype=dtype))
        for variant in ("dtcomm", "dtcomm.empty"):
            entries.append(
                Contestant(family=variant, variant="", call=partial(pool.call, "measure", variant=variant))
            )
            checks.append((variant, partial(pool.call, "wrong", variant=variant)))
    if "gloo" in only:
        # Bound to one core, Gloo's caller and its I/O thread get in each other's way.
        pool = stack.enter_context(
            Pool(TorchRank, ranks, store_file=new_store_file(), pinned=False, dtype=dtype)
        )
        entries.append(
            Contestant(family="gloo", variant="", call=partial(pool.call, "measure", variant="gloo"))
        )
        checks.append(("gloo", partial(pool.call, "wrong", variant="gloo")))
    if "mpi" in only:
        absent = mpi.why_unavailable()
        if absent:
            print(absent)
        for setting in [] if absent else mpi.SETTINGS:
            mpi_ranks = stack.enter_context(closing(mpi.MpiRanks(setting, ranks)))
            entries.append(Contestant(family="mpi", variant=setting, call=partial(mpi_ranks.call, "measure")))
    if "deepspeed" in only:
        absent = why_no_deepspeed()
        if absent:
            print(absent)
        else:
            pool = stack.enter_context(Pool(DeepSpeedRank, ranks, store_file=new_store_file(), dtype=dtype))
            call = partial(pool.call, "measure", variant="deepspeed")
            entries.append(Contestant(family="deepspeed", variant="", call=call))
            checks.append(("deepspeed", partial(pool.call, "wrong", variant="deepspeed")))
    if "oneccl" in only:
        absent = oneccl_rank.why_unavailable()
        if absent:
            print(absent)
        else:
            pool = stack.enter_context(
                Pool(oneccl_rank.OneCclRank, ranks, store_file=new_store_file(), dtype=dtype)
            )
            call = partial(pool.call, "measure", variant="oneccl")
            entries.append(Contestant(family="oneccl", variant="", call=call))
            checks.append(("oneccl", partial(pool.call, "wrong", variant="oneccl")))
    if "yardstick" in only:
        segment = stack.enter_context(closing(Segment.create(ranks, RING, largest)))
        pool = stack.enter_context(Pool(YardRank, ranks, address=segment.address, largest=largest))
        entries += yardsticks(pool, ranks)
    return entries, checks


def measure(contestants: list[Contestant], numel: int, repetitions: int, budget: float) -> list[list[float]]:
    """Return the seconds of a call on the slowest rank, by contestant and repetition; contestants take turns."""
    first = [max(contestant.call(numel=numel, warm=1, iters=1)) for contestant in contestants]
    iters = [iterations(seconds, budget) for seconds in first]
    times: list[list[float]] = [[] for _ in contestants]
    for repetition in range(repetitions):
        for contestant, count, series in in_turn(
            list(zip(contestants, iters, times, strict=True)), repetition
        ):
            series.append(max(contestant.call(numel=numel, warm=1, iters=count)))
    return times


def compare(
    ranks: int, sizes: list[int], only: list[str], quick: bool, dtype: str = "float32"
) -> dict[str, Any]:
    """Measure all contestants at all sizes; ``best`` maps size and family to the timing of the fastest variant."""
    rows: list[dict[str, Any]] = []
    best: dict[int, dict[str, Timing]] = {}
    with ExitStack() as stack:
        all_contestants, checks = contestants(stack, ranks, max(sizes), only, dtype)
        for size in sizes:
            measured = [contestant for contestant in all_contestants if size <= contestant.largest]
            numel = size // getattr(torch, dtype).itemsize
            wrong = {name: max(check(numel=numel)) for name, check in checks}
            repetitions, budget = (5, 0.02) if quick else (11, 0.04)
            times, conditions = machine.steady(
                partial(measure, measured, numel, repetitions, budget), attempts=2 if quick else 3
            )
            timings = [Timing.of(series) for series in times]
            families = best[size] = {}
            for contestant, timing in zip(measured, timings, strict=True):
                if contestant.family not in families or timing.median < families[contestant.family].median:
                    families[contestant.family] = timing
            rows.append(
                {
                    "bytes": size,
                    "ranks": ranks,
                    "dtype": dtype,
                    **conditions,
                    "wrong": wrong,
                    "contestants": [
                        {"family": contestant.family, "variant": contestant.variant, **timing.as_dict()}
                        for contestant, timing in zip(measured, timings, strict=True)
                    ],
                }
            )
    return {"ranks": ranks, "rows": rows, "best": best}


def show(comparison: dict[str, Any]) -> None:
    """Print the microseconds of all families and dtcomm's ratios."""
    families = [f for f in FAMILIES if any(f in timings for timings in comparison["best"].values())]
    ours = "dtcomm" in families
    heads = [f for f in ("gloo", "mpi", "deepspeed", "oneccl", "yardstick") if ours and f in families]
    columns = ["size", *(f"{family} µs" for family in families), *(f"vs {head}" for head in heads)]
    with_floor = ours and "floor" in families
    columns += ["of floor", "of floor, empty"] if with_floor else []
    lines = []
    for row in comparison["rows"]:
        timings: dict[str, Timing] = comparison["best"][row["bytes"]]
        line = [output.size_name(row["bytes"])]
        line += [output.microseconds(timings[f].median) if f in timings else "-" for f in families]
        line += [f"{timings[head].median / timings['dtcomm'].median:.2f}x" for head in heads]
        if with_floor:
            line += [f"{timings['floor'].median / timings[f].median:.0%}" for f in ("dtcomm", "dtcomm.empty")]
        lines.append([*line, _where(row)])
    # Our own ranks spin, so a load of their number is only ourselves.
    if (load := max(row["load"] for row in comparison["rows"])) > comparison["ranks"] + 1.5:
        print(f"the machine was busy with other work (load {load:.1f}): these figures say little")
    output.table(
        f"all_reduce, {comparison['rows'][0]['dtype']} sum in place, {comparison['ranks']} ranks",
        [*columns, "round trip"],
        lines,
    )


def _where(row: dict[str, Any]) -> str:
    trips = [trip for trip in row["round_trip_ns"] if trip is not None]
    return " / ".join(f"{trip:.0f}" for trip in trips) + " ns" + ("" if row["steady"] else ", moved")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and targets, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--sizes", type=output.parse_size, nargs="+", help="instead of 1K 64K 1M 16M 64M 256M"
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repetitions")
    parser.add_argument("--json", help="where to write instead of bench/results/all_reduce.json")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    rows: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    only = [group for group in options.only if options.dtype == "float32" or group not in FP32_ONLY]
    for ranks in options.ranks:
        sizes = options.sizes or SIZES.get(ranks, SIZES[4])
        comparison = compare(ranks, sizes, only, options.quick, options.dtype)
        show(comparison)
        rows += comparison["rows"]
        judged = judge(all_reduce_targets(ranks), comparison["best"])
        verdicts += [{**verdict, "dtype": options.dtype} for verdict in judged]
    if verdicts:
        output.table(
            "targets",
            ["target", "at", "ranks", "figure", "verdict"],
            [
                [v["name"], output.size_name(v["bytes"]), v["ranks"], v["shown"], v["verdict"]]
                for v in verdicts
            ],
        )
    for verdict in verdicts:
        del verdict["shown"]  # a text of "figure", of which the file has the median
    result = {"machine": machine.describe(), "quick": options.quick, "rows": rows, "targets": verdicts}
    print(output.write("all_reduce", result, options.json))
    return result


if __name__ == "__main__":
    wrong = [row for row in main()["rows"] if any(row["wrong"].values())]
    sys.exit(f"wrong results: {[(row['bytes'], row['wrong']) for row in wrong]}" if wrong else 0)
