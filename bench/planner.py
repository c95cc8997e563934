"""Compare predicted with measured times on this machine, and `auto` with the best algorithm.

python -m bench.planner [--ranks 2 4] [--collectives all_reduce] [--seconds S] [--json FILE]

First `dtcomm tune` measures these numbers of ranks at powers of two. Then every algorithm and auto are sampled in new
processes at sizes in between and at the ends, and compared with the table's predictions for the same placement of the
CPUs. The algorithm that auto chose and the fastest one are then sampled alternately once more, and all samples count,
because the fastest of six is partly so by chance. If the CPUs were in a placement that the table does not have, both
parts are repeated once.

Targets: a median error of 15 %, and auto within 10 % of the best at every size. The exit status is 1 if one is missed.
It takes about a minute for each number of ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import machine, output
from dtcomm import codecs
from dtcomm.cli.tune import main as tune_command
from dtcomm.cli.tune.measure import (
    BenchmarkCase,
    CaseSamples,
    TuneOptions,
    benchmark_cases,
    lower_quartile,
    sample_cases,
)
from dtcomm.launch.ranks import run_ranks
from dtcomm.planner import parse as parse_table
from dtcomm.planner import select
from dtcomm.planner.cost_model import Table

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 3 * KB, 12 * KB, 48 * KB, 192 * KB, 768 * KB, 3 * MB, 12 * MB, 48 * MB, 64 * MB)
CODECS = ("none", "int8")
MEASURED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")  # by `dtcomm tune`
MOST_ERROR, MOST_REGRET = 0.15, 0.10
REPEAT_SHARE = 0.4  # of the check's time, for auto and the fastest algorithm alternately
ATTEMPTS = 2


def cases(names: Sequence[str], ranks: int) -> list[BenchmarkCase]:
    """Return cases with all algorithms and auto; `dtcomm tune` measures codecs in all_reduce alone."""
    selected = []
    for name in names:
        options = TuneOptions(collectives=(name,), codecs=("none",), largest=KB, seconds=1)
        every = next(benchmark_cases(options, ranks, 1)).algorithms
        for size in SIZES:
            for spec in CODECS if name == "all_reduce" else ("none",):
                case = BenchmarkCase(
                    collective=name, codec=codecs.codec(spec), nbytes=size, algorithms=(*every, "auto")
                )
                selected.append(case)
    return selected


def check(
    rank: int, world_size: int, names: Sequence[str], seconds: float, text: str
) -> list[tuple[CaseSamples, CaseSamples | None]]:
    """Sample all algorithms and auto at all sizes, then auto's algorithm and the fastest one alternately."""
    from dtcomm.cli.perf import placement
    from dtcomm.cli.tune import measure as tune_measure

    cpus = tune_measure.first_two_cpus()
    placement.pin_to_core(None)
    first = sample_cases(cases(names, world_size), (1 - REPEAT_SHARE) * seconds, cpus)
    pairs = {
        at: pair for at, visits in enumerate(first) if (pair := _pair(visits, world_size, parse_table(text)))
    }
    second = dict(
        zip(pairs, sample_cases(list(pairs.values()), REPEAT_SHARE * seconds, cpus) if pairs else [])
    )
    return [(visits, second.get(at)) for at, visits in enumerate(first)]


def _chosen(case: BenchmarkCase, ranks: int, table: Table) -> str:
    return select(case.collective, case.nbytes // 4, torch.float32, case.codec, ranks, table=table)


def _pair(visits: CaseSamples, ranks: int, table: Table) -> BenchmarkCase | None:
    """Return a case with auto's algorithm and the fastest one of each placement; None if they are the same."""
    case = visits.case
    fastest = []
    for placement in visits.medians:
        times = {name: seconds for name, seconds in visits.seconds(placement).items() if name != "auto"}
        fastest.append(min(times, key=lambda name: times[name]))
    names = tuple(dict.fromkeys((_chosen(case, ranks, table), *fastest)))
    if len(names) < 2:
        return None
    return BenchmarkCase(collective=case.collective, codec=case.codec, nbytes=case.nbytes, algorithms=names)


def compare(
    ranks: int, samples: list[tuple[CaseSamples, CaseSamples | None]], table: Table
) -> list[dict[str, Any]]:
    """Compare samples with the table's predictions, and auto with the fastest algorithm.

    Returns:
        A row for each case and placement that the table contains.
    """
    rows = []
    for visits, again in samples:
        case = visits.case
        chosen = _chosen(case, ranks, table)
        for placement in visits.medians:
            if placement not in table.placements(case.collective, case.codec, ranks, 1):
                continue
            measured = table.measurements(case.collective, case.codec, ranks, 1, placement)
            times = visits.seconds(placement)
            auto = times.pop("auto")
            best = min(times, key=lambda name: times[name])
            turns = _pooled(visits, again, placement, chosen)
            predicted = {name: fit.seconds(case.nbytes) for name, fit in measured.items()}
            rows.append(
                {
                    "ranks": ranks,
                    "collective": case.collective,
                    "bytes": case.nbytes,
                    "codec": str(case.codec),
                    "cores": placement,
                    "visits": len(visits.medians[placement][best]),
                    "measured_us": {name: round(time * 1e6, 2) for name, time in times.items()},
                    "predicted_us": {name: round(time * 1e6, 2) for name, time in predicted.items()},
                    "errors": {name: round(time / times[name] - 1, 4) for name, time in predicted.items()},
                    "auto": chosen,
                    "auto_us": round(auto * 1e6, 2),
                    "best": best,
                    "pooled_us": {name: round(time * 1e6, 2) for name, time in turns.items()},
                    "auto_over_best": round(turns[chosen] / min(turns.values()) - 1, 4),
                }
            )
    return rows


def _pooled(visits: CaseSamples, again: CaseSamples | None, placement: str, chosen: str) -> dict[str, float]:
    """Return the lower quartile of all samples of each algorithm: the first ones, those of auto, the alternate ones."""
    pooled = {name: list(times) for name, times in visits.medians[placement].items()}
    pooled[chosen] += pooled.pop("auto")
    for name, times in (again.medians.get(placement, {}) if again is not None else {}).items():
        pooled[name] += times
    return {name: lower_quartile(times) for name, times in pooled.items()}


def measure(
    ranks: int, collectives: Sequence[str], seconds: float, path: Path
) -> tuple[list[dict[str, Any]], int]:
    """Tune and check a number of ranks; return the rows, and how many cases were in placements unknown to the table."""
    arguments = ["--nproc", str(ranks), "--seconds", str(seconds), "--output", str(path)]
    arguments += [word for name in collectives for word in ("--collective", name)]
    for _ in range(ATTEMPTS):
        if tune_command.main(arguments):
            sys.exit("tuning failed")
        text = path.read_text()
        env = {"DTCOMM_TUNE": str(path)}
        samples = run_ranks(check, ranks, collectives, seconds, text, timeout=None, fresh=True, env=env)[0]
        rows = compare(ranks, samples, parse_table(text))
        unknown = sum(len(visits.medians) for visits, _ in samples) - len(rows)
        if not unknown:
            break
    return rows, unknown


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print both tables, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--collectives", nargs="+", default=["all_reduce"], choices=MEASURED)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for the tuning, and for the check, of each"
    )
    parser.add_argument("--json", help="where to write instead of bench/results/planner.json")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    unknown: dict[int, int] = {}
    with tempfile.TemporaryDirectory(prefix="dtcomm-bench-") as folder:
        path = Path(folder) / "tune.json"
        for ranks in options.ranks:
            measured, unknown[ranks] = measure(ranks, options.collectives, options.seconds, path)
            rows += measured
    summary = []
    for ranks in options.ranks:
        rows_of_count = [row for row in rows if row["ranks"] == ranks]
        errors = [abs(error) for row in rows_of_count for error in row["errors"].values()]
        if not errors:
            sys.exit(f"{ranks} ranks: no placement of the CPUs occurred twice; nothing can be compared")
        regrets = [row["auto_over_best"] for row in rows_of_count]
        summary.append(
            {
                "ranks": ranks,
                "median_error": round(statistics.median(errors), 4),
                "p90_error": round(sorted(errors)[int(0.9 * len(errors))], 4),
                "worst_auto_over_best": max(regrets),
                "auto_within_target": sum(regret <= MOST_REGRET for regret in regrets),
                "of": len(regrets),
                "in_unknown_placements": unknown[ranks],
            }
        )
    show(rows, summary)
    met = [
        entry["median_error"] <= MOST_ERROR and entry["auto_within_target"] == entry["of"]
        for entry in summary
    ]
    every = [abs(error) for row in rows for error in row["errors"].values()]
    result = {
        "machine": machine.describe(),
        "seconds": options.seconds,
        "median_error": round(statistics.median(every), 4),
        "targets": {"median_error": MOST_ERROR, "auto_over_best": MOST_REGRET},
        "summary": summary,
        "rows": rows,
        "verdict": "PASS" if all(met) else "MISS",
    }
    print(output.write("planner", result, options.json), result["verdict"])
    return result


def show(rows: list[dict[str, Any]], summary: list[dict[str, Any]]) -> None:
    """Print a line for each size, and the summary."""
    lines = []
    for row in rows:
        errors = [abs(error) for error in row["errors"].values()]
        lines.append(
            [
                row["collective"],
                output.size_name(row["bytes"]),
                str(row["ranks"]),
                row["codec"],
                row["cores"],
                f"{statistics.median(errors):.0%}",
                f"{max(errors):.0%}",
                row["auto"],
                f"{row['auto_us']:.4g}",
                row["best"],
                f"{row['measured_us'][row['best']]:.4g}",
                f"{row['auto_over_best']:+.0%}",
            ]
        )
    columns = [
        "collective",
        "size",
        "ranks",
        "codec",
        "cores",
        "median error",
        "worst",
        "auto",
        "us",
        "best",
        "us",
        "auto over best",
    ]
    output.table("predicted against measured, and auto against the best", columns, lines)
    output.table(
        "targets",
        ["ranks", "median error (15 %)", "90 % below", "auto within 10 %", "worst"],
        [
            [
                str(entry["ranks"]),
                f"{entry['median_error']:.1%}",
                f"{entry['p90_error']:.0%}",
                f"{entry['auto_within_target']} of {entry['of']}",
                f"{entry['worst_auto_over_best']:+.0%}",
            ]
            for entry in summary
        ],
    )


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
