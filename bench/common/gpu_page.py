"""Keep several runs of bench.gpu_fused and bench.gpu_kernels as one result, and make the tables of docs/results/gpu.md.

python -m bench.common.gpu_page --commit b00d61a1 --fused RUN.json RUN.json RUN.json --kernels RUN.json ...

A GPU is often in a machine without this repository's history, so the two programs write a run to the file that `--json`
names, and this module keeps the runs: bench/results/gpu_fused.json and gpu_kernels.json then hold the medians of all
runs of one commit, each with its least and greatest, and replace what was kept before. Of a result of another commit
that they replace, the shares stay in ``before``, which the tables show beside the new ones. `python -m bench.pages`
then writes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import gpu_kernels
from bench.common import output, pages, runs
from bench.gpu_fused import FLOOR, TARGETS

Result = dict[str, Any]
SHOWN_TIER = (*gpu_kernels.FIRST_TIER, "none")
VERBS = ("encode", "decode", "reduce 8", "reduce_encode 7 + local", "encode with residual")
# What a result can do without: a rate that follows from bytes and time, and the range within a run.
DROPPED = ("gigabytes_per_second", "spread")
# The machine has a field of its own. Rows that a run skipped for lack of time say how many runs have them.
NO_FIGURES = ("device", "versions", "seconds", "cut")
DIGITS = 6


def keep(program: str, paths: Sequence[Path], commit: str, date: str) -> Path:
    """Write the medians of several runs to ``bench/results``; return the path.

    Args:
        program: ``gpu_fused`` or ``gpu_kernels``.
        paths: The files of the runs, oldest first.
        commit: Of the code that ran.
        date: Of the runs, such as ``2026-11-26``.

    Raises:
        ValueError: The runs are of several kinds of GPU, or of several versions of torch or the driver.
    """
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    machines = [_machine(result) for result in results]
    if any(machine != machines[0] for machine in machines):
        raise ValueError(f"{program}: the runs are of different machines: {machines}")
    figures = []
    for result in results:
        figures.append(_rounded({name: entry for name, entry in result.items() if name not in NO_FIGURES}))
        runs.check_rows(figures[-1])
    measurement = {"date": date, "commit": commit, "processor": machines[0]["gpu"]}
    out = output.RESULTS / f"{program}.json"
    kept: Result = {
        "program": program,
        "machine": machines[0],
        **runs.merge(figures),
        **_before(out, commit),
        "measurements": [measurement] * len(results),
    }
    output.write_whole(out, output.format_json(kept))
    return out


def _machine(result: Result) -> Result:
    versions = result["versions"]
    return {
        "gpu": result["device"]["name"],
        "driver": result["device"]["driver"],
        **{name: versions[name] for name in ("torch", "cuda", "python", "cores")},
    }


def _rounded(value: Any) -> Any:
    """Return a result without `DROPPED` and with `DIGITS` significant digits."""
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items() if name not in DROPPED}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value


def _before(out: Path, commit: str) -> Result:
    """Return the shares of the result that is replaced; of one of the same commit, those that it replaced."""
    if not out.exists():
        return {}
    old = json.loads(out.read_text(encoding="utf-8"))
    latest = old["measurements"][-1]
    if latest["commit"] == commit:
        return {"before": old["before"]} if "before" in old else {}
    shares = {_label(row): row["of_copy" if "verb" in row else "of_floor"] for row in _with_shares(old)}
    return {"before": {**latest, "runs": len(old["measurements"]), "shares": shares}}


def _with_shares(result: Result) -> list[Result]:
    """Return the rows that have a share of a copy or of the floor, of codec kernels those of the largest size."""
    if "rows" in result:
        return _largest(result["rows"])
    return [*result["bandwidth"], *result["published"]]


def _label(row: Result) -> str:
    """Return by what a row is found in ``before``."""
    return (
        f"{row['codec']}, {row['verb']}"
        if "verb" in row
        else f"{row['codec']}, {row['dtype']}, {row['mib']:g} MiB"
    )


def _largest(rows: Sequence[Result]) -> list[Result]:
    mib = max(row["mib"] for row in rows)
    return [row for row in rows if row["mib"] == mib]


def _share(row: Result, field: str) -> str:
    return f"{row[field]:.2f}" + pages.spread(row, field, "{:.2f}".format)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _microseconds(row: Result, field: str = "microseconds") -> str:
    return _number(row[field]) + pages.spread(row, field, _number)


def _earlier(result: Result, label: str) -> str:
    share = result.get("before", {}).get("shares", {}).get(label)
    return "" if share is None else f"{share:.2f}"


def _by_verb(
    rows: Iterable[Result], codecs: Iterable[str], cell: Callable[[Result], str], verbs: Sequence[str] = VERBS
) -> str:
    cells = {(row["codec"], row["verb"]): cell(row) for row in rows}
    return pages.markdown(
        ["codec", *verbs],
        [[f"`{codec}`", *(cells.get((codec, verb), "") for verb in verbs)] for codec in codecs],
        aligned=True,
    )


def kernels(result: Result) -> str:
    """Return the tables of bench.gpu_kernels: shares of a device copy of the same bytes."""
    rows = _largest(result["rows"])
    others = [name for name in dict.fromkeys(row["codec"] for row in rows) if name not in SHOWN_TIER]
    small = [row for row in result["rows"] if row["mib"] != rows[0]["mib"] and row["codec"] in SHOWN_TIER]
    smaller = [
        f"At {mib:,.0f} MiB the same kernels have {min(shares):.2f} to {max(shares):.2f} of this copy."
        for mib in dict.fromkeys(row["mib"] for row in small)
        if (shares := [row["of_copy"] for row in small if row["mib"] == mib])
    ]
    parts = [
        f"The first tier, and `none`, {rows[0]['mib']:,.0f} MiB of fp32:",
        _by_verb(rows, SHOWN_TIER, lambda row: _share(row, "of_copy")),
        *smaller,
        "All other codecs, whose kernels are slower:",
        _by_verb(rows, others, lambda row: _share(row, "of_copy")),
    ]
    if "before" in result:
        parts += [
            f"The first tier before ({_earlier_runs(result)}) and now:",
            _by_verb(
                rows,
                SHOWN_TIER,
                lambda row: f"{_earlier(result, _label(row))} → {row['of_copy']:.2f}",
                VERBS[:4],
            ),
        ]
    return "\n\n".join(parts)


def _earlier_runs(result: Result) -> str:
    """Return the commit and the number of runs of ``before``, and its GPU where that is another one."""
    before = result["before"]
    runs = "one run" if before["runs"] == 1 else f"median of {before['runs']} runs"
    other = before["processor"] != result["machine"]["gpu"]
    return f"commit {before['commit']}, {runs}" + (f", on {before['processor']}" if other else "")


def two_shot(result: Result) -> str:
    """Return the tables of bench.gpu_fused that have a share of the memory floor."""
    rows, before = result["bandwidth"], result.get("before")
    columns, note = ["codec", "µs", "of the floor"], ""
    if before:
        columns.append("before")
        note = f" Before: {_earlier_runs(result)}."
    lines = [
        [
            f"`{row['codec']}`",
            _microseconds(row),
            _share(row, "of_floor"),
            *([_earlier(result, _label(row))] if before else []),
        ]
        for row in rows
    ]
    targets = ", ".join(f"`{row['codec']}` {row['of_floor']:.2f}" for row in rows if row["codec"] in TARGETS)
    return "\n\n".join(
        [
            f"{rows[0]['ranks']} virtual ranks with {rows[0]['mib']:g} MiB of fp32 each.{note}",
            pages.markdown(columns, lines, aligned=True),
            f"**The target, {FLOOR} of the floor, is {result['verdict']}: {targets}.**",
            "The sizes of published tables, in bf16:",
            _published(result["published"]),
        ]
    )


def _published(rows: Sequence[Result]) -> str:
    cells = {(row["mib"], row["codec"]): row for row in rows}
    sizes, codecs = dict.fromkeys(row["mib"] for row in rows), dict.fromkeys(row["codec"] for row in rows)
    lines = []
    for mib in sizes:
        line = [output.size_name(int(mib * 2**20))]
        for codec in codecs:
            row = cells.get((mib, codec))
            line += [_microseconds(row), _share(row, "of_floor")] if row else ["", ""]
        published = next(row["published"] for row in rows if row["mib"] == mib)
        lines.append([*line, (published or "").replace(" us ", " µs ")])
    columns = [column for codec in codecs for column in (f"`{codec}`, µs", "of the floor")]
    return pages.markdown(
        ["a rank's tensor", *columns, "published, of 8 GPUs with NVLink"], lines, aligned=True
    )


def latency(result: Result) -> str:
    """Return the table of bench.gpu_fused's one-shot calls in replays of a graph."""
    rows = {(row["codec"], row["size"]): row for row in result["latency"]}
    codecs = list(dict.fromkeys(codec for codec, _ in rows))
    fields = ("replayed_microseconds", "launched_microseconds")
    lines = [
        [
            output.size_name(size),
            *(_microseconds(rows[codec, size], field) for field in fields for codec in codecs),
        ]
        for size in dict.fromkeys(size for _, size in rows)
    ]
    columns = ["size", *(f"`{codec}`, {how}, µs" for how in ("replayed", "launched") for codec in codecs)]
    return pages.markdown(columns, lines, aligned=True)


def processes(result: Result) -> str:
    """Return the table of the all-reduces between two processes that share the GPU."""
    times = result["processes"]
    lines = []
    for name in times:
        if not name.endswith("_range"):
            who, _, size = name.rpartition(" ")
            text = times[name] if isinstance(times[name], str) else _milliseconds(times, name)
            lines.append([who, output.size_name(int(size)), text])
    return pages.markdown(["all_reduce", "size", "ms"], lines, aligned=True)


def _milliseconds(times: Result, name: str) -> str:
    return f"{times[name] / 1e3:.2f}" + pages.spread(times, name, lambda value: f"{value / 1e3:.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Keep the runs that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", required=True, help="of the code that ran")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d", time.gmtime()), help="default: today")
    parser.add_argument(
        "--fused", type=Path, nargs="+", default=[], help="runs of bench.gpu_fused, oldest first"
    )
    parser.add_argument(
        "--kernels", type=Path, nargs="+", default=[], help="runs of bench.gpu_kernels, oldest first"
    )
    options = parser.parse_args(arguments)
    for program, paths in (("gpu_fused", options.fused), ("gpu_kernels", options.kernels)):
        if paths:
            print(keep(program, paths, options.commit, options.date))


if __name__ == "__main__":
    main()
