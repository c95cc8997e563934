"""Compare predicted with measured times on this machine, and `auto` with the best algorithm.

python -m bench.planner [--ranks 2 4] [--collectives all_reduce] [--seconds S] [--json FILE]

First `dtcomm tune` measures these numbers of ranks at powers of two. Then every algorithm and auto are sampled in new
processes at sizes in between and at the ends, and compared with the table's predictions for the same placement of the
CPUs. The algorithm that auto chose and the fastest one are then sampled alternately once more, and all samples count,
because the fastest of six is so partly by chance. If the CPUs were in a placement that the table does not have, both
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
MEASURED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")  # what `dtcomm tune` does
MOST_ERROR, MOST_REGRET = 0.15, 0.10
AGAIN = 0.4  # of the check's time, for auto and the fastest in turn
ATTEMPTS = 2


def cases(names: Sequence[str], ranks: int) -> list[BenchmarkCase]:
    """All algorithms and auto; `dtcomm tune` measures a codec in all_reduce alone."""
    found = []
    for name in names:
        options = TuneOptions(collectives=(name,), codecs=("none",), largest=KB, seconds=1)
        every = next(benchmark_cases(options, ranks, 1)).algorithms
        for size in SIZES:
            for spec in CODECS if name == "all_reduce" else ("none",):
                case = BenchmarkCase(
                    collective=name, codec=codecs.codec(spec), nbytes=size, algorithms=(*every, "auto")
                )
                found.append(case)
    return found


def check(
    rank: int, world_size: int, names: Sequence[str], seconds: float, text: str
) -> list[tuple[CaseSamples, CaseSamples | None]]:
    """All algorithms and auto at all sizes, then what auto takes and what was fastest, on each rank."""
    from dtcomm.cli.perf import placement
    from dtcomm.cli.tune import measure as tune_measure

    cpus = tune_measure.first_two_cpus()
    placement.pin_to_core(None)
    first = sample_cases(cases(names, world_size), (1 - AGAIN) * seconds, cpus)
    pairs = {
        at: pair for at, visits in enumerate(first) if (pair := _pair(visits, world_size, parse_table(text)))
    }
    second = dict(zip(pairs, sample_cases(list(pairs.values()), AGAIN * seconds, cpus) if pairs else []))
    return [(visits, second.get(at)) for at, visits in enumerate(first)]


def _chosen(case: BenchmarkCase, ranks: int, table: Table) -> str:
    return select(case.collective, case.nbytes // 4, torch.float32, case.codec, ranks, table=table)


def _pair(visits: CaseSamples, ranks: int, table: Table) -> BenchmarkCase | None:
    """What auto takes and the fastest of each placement; None where they are one."""
    case = visits.case
    fastest = []
    for where in visits.medians:
        times = {name: each for name, each in visits.seconds(where).items() if name != "auto"}
        fastest.append(min(times, key=lambda name: times[name]))
    names = tuple(dict.fromkeys((_chosen(case, ranks, table), *fastest)))
    if len(names) < 2:
        return None
    return BenchmarkCase(collective=case.collective, codec=case.codec, nbytes=case.nbytes, algorithms=names)


def compare(
    ranks: int, found: list[tuple[CaseSamples, CaseSamples | None]], table: Table
) -> list[dict[str, Any]]:
    """With the table's predictions: errors by algorithm, what auto takes, and how far it is from the best.

    A row for each case and placement that the table knows.
    """
    rows = []
    for visits, again in found:
        case = visits.case
        chosen = _chosen(case, ranks, table)
        for where in visits.medians:
            if where not in table.placements(case.collective, case.codec, ranks, 1):
                continue
            measured = table.measurements(case.collective, case.codec, ranks, 1, where)
            times = visits.seconds(where)
            auto = times.pop("auto")
            best = min(times, key=lambda name: times[name])
            turns = _pooled(visits, again, where, chosen)
            predicted = {name: each.seconds(case.nbytes) for name, each in measured.items()}
            rows.append(
                {
                    "ranks": ranks,
                    "collective": case.collective,
                    "bytes": case.nbytes,
                    "codec": str(case.codec),
                    "cores": where,
                    "visits": len(visits.medians[where][best]),
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


def _pooled(visits: CaseSamples, again: CaseSamples | None, where: str, chosen: str) -> dict[str, float]:
    """Of all visits there were: the first ones, those of auto, which are its algorithm's, and those in turn."""
    found = {name: list(times) for name, times in visits.medians[where].items()}
    found[chosen] += found.pop("auto")
    for name, times in (again.medians.get(where, {}) if again is not None else {}).items():
        found[name] += times
    return {name: lower_quartile(times) for name, times in found.items()}


def measure(
    ranks: int, collectives: Sequence[str], seconds: float, path: Path
) -> tuple[list[dict[str, Any]], int]:
    """Tunes and checks a group; the rows, and how many cases stood in placements that the table does not know."""
    asked = ["--nproc", str(ranks), "--seconds", str(seconds), "--output", str(path)]
    asked += [word for name in collectives for word in ("--collective", name)]
    for _ in range(ATTEMPTS):
        if tune_command.main(asked):
            sys.exit("tuning failed")
        text = path.read_text()
        env = {"DTCOMM_TUNE": str(path)}
        found = run_ranks(check, ranks, collectives, seconds, text, timeout=None, fresh=True, env=env)[0]
        rows = compare(ranks, found, parse_table(text))
        unknown = sum(len(visits.medians) for visits, _ in found) - len(rows)
        if not unknown:
            break
    return rows, unknown


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measures, prints both tables, writes the file; returns what it wrote."""
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
            found, unknown[ranks] = measure(ranks, options.collectives, options.seconds, path)
            rows += found
    summary = []
    for ranks in options.ranks:
        here = [row for row in rows if row["ranks"] == ranks]
        errors = [abs(error) for row in here for error in row["errors"].values()]
        if not errors:
            sys.exit(f"{ranks} ranks: the CPUs were nowhere twice; nothing can be compared")
        regrets = [row["auto_over_best"] for row in here]
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
        each["median_error"] <= MOST_ERROR and each["auto_within_target"] == each["of"] for each in summary
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
    """One line a size, and the verdicts."""
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
                str(each["ranks"]),
                f"{each['median_error']:.1%}",
                f"{each['p90_error']:.0%}",
                f"{each['auto_within_target']} of {each['of']}",
                f"{each['worst_auto_over_best']:+.0%}",
            ]
            for each in summary
        ],
    )


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
