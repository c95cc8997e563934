"""Predicted against measured on this machine, and `auto` against the best algorithm.

python -m bench.planner [--ranks 2 4] [--collectives all_reduce] [--seconds S] [--json FILE]

First `dtcomm tune` measures groups of these ranks at every second power of two; then every algorithm, and auto, is
measured at the sizes in between and at the ends, in processes of their own, and compared with what the table says.
Targets: a median error of 15 %, auto within 10 % of the best at every size; exit status 1 where one is missed. About a
minute for each number of ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import machine, output
from dtcomm import codecs
from dtcomm.cli import tune
from dtcomm.cli.tune_measure import Contest, contests, run
from dtcomm.cli.tune_measure import Options as Measuring
from dtcomm.planner import parse as parse_table
from dtcomm.testing.ranks import run_ranks

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 2 * KB, 8 * KB, 32 * KB, 128 * KB, 512 * KB, 2 * MB, 8 * MB, 32 * MB, 64 * MB)
CODECS = ("none", "int8")
MEASURED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")  # what `dtcomm tune` does
MOST_ERROR, MOST_REGRET = 0.15, 0.10


def cases(collectives: Sequence[str]) -> list[tuple[str, str, int]]:
    """Collective, codec and bytes; `dtcomm tune` measures a codec in all_reduce alone."""
    return [
        (name, spec, size)
        for name in collectives
        for size in SIZES
        for spec in (CODECS if name == "all_reduce" else ("none",))
    ]


def check(rank: int, world_size: int, collectives: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """All algorithms and auto at all sizes, on each rank; DTCOMM_TUNE names the table."""
    from dtcomm.cli import perf_host

    perf_host.pin(None)
    rows = []
    listed = cases(collectives)
    for name, spec, size in listed:
        options = Measuring(collectives=(name,), codecs=("none",), largest=KB, seconds=seconds)
        names = next(contests(options, world_size, 1)).names
        contest = Contest(collective=name, codec=codecs.codec(spec), nbytes=size, names=(*names, "auto"))
        times = run(contest, seconds / len(listed))
        rows.append({"collective": name, "bytes": size, "codec": spec, "times": times})
    return rows


def compare(ranks: int, rows: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """With the table's predictions: errors by algorithm, what auto takes, and how far it is from the best."""
    import torch

    from dtcomm.planner import select

    table = parse_table(text)
    found = []
    for row in rows:
        codec = codecs.codec(row["codec"])
        measured = table.measurements(row["collective"], codec, ranks, 1)
        times = dict(row["times"])
        auto = times.pop("auto")
        best = min(times, key=lambda name: times[name])
        chosen = select(row["collective"], row["bytes"] // 4, torch.float32, codec, ranks, table=table)
        found.append(
            {
                "ranks": ranks,
                "collective": row["collective"],
                "bytes": row["bytes"],
                "codec": row["codec"],
                "measured_us": {name: round(time * 1e6, 2) for name, time in times.items()},
                "predicted_us": {
                    name: round(each.seconds(row["bytes"]) * 1e6, 2) for name, each in measured.items()
                },
                "errors": {
                    name: round(each.seconds(row["bytes"]) / times[name] - 1, 4)
                    for name, each in measured.items()
                },
                "auto": chosen,
                "auto_us": round(auto * 1e6, 2),
                "best": best,
                # What auto takes is one of these algorithms, measured twice: the better of the two is its own.
                "auto_over_best": round(min(auto, times[chosen]) / times[best] - 1, 4),
            }
        )
    return found


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
    with tempfile.TemporaryDirectory(prefix="dtcomm-bench-") as folder:
        path = Path(folder) / "tune.json"
        for ranks in options.ranks:
            asked = ["--nproc", str(ranks), "--seconds", str(options.seconds)]
            asked += [word for name in options.collectives for word in ("--collective", name)]
            if tune.main([*asked, "--output", str(path)]):
                sys.exit("tuning failed")
            measured = run_ranks(
                check,
                ranks,
                options.collectives,
                options.seconds,
                timeout=None,
                fresh=True,
                env={"DTCOMM_TUNE": str(path)},
            )[0]
            rows += compare(ranks, measured, path.read_text())
    summary = []
    for ranks in options.ranks:
        here = [row for row in rows if row["ranks"] == ranks]
        errors = [abs(error) for row in here for error in row["errors"].values()]
        regrets = [row["auto_over_best"] for row in here]
        summary.append(
            {
                "ranks": ranks,
                "median_error": round(statistics.median(errors), 4),
                "p90_error": round(sorted(errors)[int(0.9 * len(errors))], 4),
                "worst_auto_over_best": max(regrets),
                "auto_within_target": sum(regret <= MOST_REGRET for regret in regrets),
                "of": len(regrets),
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
