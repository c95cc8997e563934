"""``dtcomm tune``: measure this machine, or this job, and keep what ``algorithm="auto"`` decides by.

To read on: tune_measure (what a rank does), dtcomm.planner.cost_model (the table).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import algorithms, codecs, env
from dtcomm.cli._sizes import size_argument
from dtcomm.cli.perf.main import LAUNCHER
from dtcomm.cli.tune.measure import Options, Rank0, group
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import RankError, run_ranks
from dtcomm.planner import parse as parse_table
from dtcomm.planner.cost_model import Table

COLUMNS = 9  # of sizes that are shown
EPILOG = """\
Without torchrun local ranks are started, 2 and 4 of them one after the other (--nproc); under torchrun the ranks of the
job are measured, on however many hosts. The table holds times by collective, algorithm, codec and size, the rates of
codecs, and the links that follow from them. Ranks read it when a communicator is made: rank 0's, which all others get.
What other groups were measured with earlier stays in the file. DTCOMM_TUNE=off leaves it unread."""


def main(argv: list[str] | None = None) -> int:
    """0 where the table is written, 2 where a rank failed or an argument is wrong."""
    options = _parse(argv)
    launched = all(name in os.environ for name in LAUNCHER)
    begun = time.time()
    writes = not launched or os.environ["RANK"] == "0"
    try:
        path = options.output or _default()
        known = _known(path) if writes and not options.fresh else []
        found = _as_rank(options) if launched else _own_ranks(options)
        if not writes:
            return 0
        document = _merged(known, found, time.time() - begun)
        parse_table(json.dumps(document))  # what cannot be read back is not written
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except (ValueError, TypeError, OSError, DtcommError, RankError) as error:
        print(f"dtcomm tune: {error}", file=sys.stderr)
        return 2
    if options.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        _show(found, path, time.time() - begun)
    return 0


def measure(rank: int, world_size: int, options: Options) -> list[dict[str, Any]] | None:
    """On each of the ranks that are started; rank 0 returns what was found."""
    return group(options)


def _own_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    begun = time.time()
    for at, ranks in enumerate(options.nproc):
        # What one group left over or overran is the next one's.
        left = max(0.0, options.seconds - (time.time() - begun)) / (len(options.nproc) - at)
        least = 0.5 * options.seconds / len(options.nproc)
        asked = replace(_options(options, max(left, least)), begun=time.time())
        first = run_ranks(measure, ranks, asked, timeout=None, fresh=True, env={"DTCOMM_TUNE": "off"})[0]
        found += first
    return found


def _as_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    os.environ["DTCOMM_TUNE"] = "off"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    try:
        return group(_options(options, options.seconds)) or []
    finally:
        dist.destroy_process_group()


def _options(given: argparse.Namespace, seconds: float) -> Options:
    return Options(
        collectives=tuple(
            given.collective or ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
        ),
        codecs=tuple(given.codec or ("none", "int8")),
        largest=given.maxbytes,
        seconds=seconds,
        quiet=given.json or not sys.stderr.isatty(),
    )


def _default() -> Path:
    chosen = env.get("DTCOMM_TUNE")
    return Path(chosen) if chosen not in ("", "off") else env.tune_file()


def _known(path: Path) -> list[dict[str, Any]]:
    # Read before anything is measured: what is no table is not overwritten.
    if not path.exists():
        return []
    measured: list[dict[str, Any]] = parse_table(path.read_text(encoding="utf-8")).as_dict()["measured"]
    return measured


def _merged(known: list[dict[str, Any]], found: list[Rank0], seconds: float) -> dict[str, Any]:
    # Groups that were not measured now keep what was known of them, and those that were where CPUs were not now.
    table = Table().as_dict()
    measured = {(each["ranks"], each["hosts"]) for each in found}
    rows = [row for each in found for row in each["measured"]]
    seen = {_key(row) for row in rows}
    kept = [
        row
        for row in known
        if (row["ranks"], row["hosts"]) not in measured or (row["placement"] and _key(row) not in seen)
    ]
    last = found[-1]
    table.update(
        source=f"dtcomm tune on {platform.node()}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
        seconds=round(seconds, 1),
        machine={"node": platform.node(), "cores": os.cpu_count(), "processor": _processor()},
        rates=last["rates"],
        measured=[*kept, *rows],
    )
    for each in found:
        table["links"].update(each["links"])
    return table


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("collective", "algorithm", "codec", "ranks", "hosts", "placement"))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _show(found: list[Rank0], path: Path, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table as Shown

    console = Console()
    console = Console(width=max(console.width, 118))
    for measured in found:
        shown = Shown(
            title=f"{measured['ranks']} ranks on {measured['hosts']} host(s): the fastest, in us",
            title_justify="left",
        )
        sizes = sorted({size for each in measured["measured"] for size, _ in each["points_us"]})
        shown.add_column("collective", no_wrap=True)
        shown.add_column("codec", no_wrap=True)
        shown.add_column("cores", no_wrap=True)
        step = -(-len(sizes) // COLUMNS)
        sizes = sorted({*sizes[::-step]})
        for size in sizes:
            shown.add_column(_size(size), justify="right")
        kinds: dict[tuple[str, str, str], dict[int, dict[str, float]]] = {}
        for each in measured["measured"]:
            by_size = kinds.setdefault((each["collective"], each["codec"], each["placement"]), {})
            for size, time_us in each["points_us"]:
                by_size.setdefault(size, {})[each["algorithm"]] = time_us
        for kind, by_size in kinds.items():
            cells = []
            for size in sizes:
                best = min(known, key=lambda name: known[name]) if (known := by_size.get(size, {})) else ""
                cells.append(f"{known[best]:,.0f}\n{best}" if best else "-")
            shown.add_row(*kind, *cells)
        console.print(shown)
    console.print(f"Wrote {path} in {seconds:.0f} s; algorithm=auto reads it from now on.", soft_wrap=True)


def _size(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dtcomm tune",
        description="Measure this machine, or this job, and keep what algorithm=auto decides by.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--nproc", metavar="N", type=int, nargs="+", default=[2, 4], help="local ranks to start (default 2 4)"
    )
    add("--output", "-o", metavar="FILE", type=Path, help=f"default DTCOMM_TUNE, or {env.tune_file()}")
    add("--seconds", metavar="S", type=float, default=45.0, help="about how long it may take (default 45)")
    add("--collective", metavar="NAME", action="append", choices=algorithms.collectives(),
        help="only this one; may be repeated (default: those with a choice of algorithms)")  # fmt: skip
    add("--codec", metavar="SPEC", action="append", help="may be repeated (default none and int8)")
    add(
        "-e",
        "--maxbytes",
        metavar="SIZE",
        type=size_argument(1024),
        default=64 << 20,
        help="largest size (default 64M)",
    )
    add("--fresh", action="store_true", help="forget what the file holds of other groups")
    add("--json", action="store_true", help="print the table as JSON")
    given = parser.parse_args(argv)
    if any(ranks < 2 for ranks in given.nproc):
        parser.error(f"--nproc {min(given.nproc)}: want at least 2 ranks")
    if given.seconds <= 0:
        parser.error(f"--seconds {given.seconds:g}: want more than 0")
    for spec in given.codec or ():
        try:
            codecs.codec(spec)
        except ValueError as error:
            parser.error(str(error))
    return given
