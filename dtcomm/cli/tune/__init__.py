"""Command ``dtcomm tune``: measure this machine, or this job, and write the table that ``algorithm="auto"`` uses.

`dtcomm.cli.tune.measure` is what a rank does; `dtcomm.planner.cost_model.Table` is the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import algorithms, codecs, env
from dtcomm.cli import LAUNCHER, format_size, new_table, size_argument, split_codecs, write_json
from dtcomm.cli.perf.args import add_import_argument, import_modules
from dtcomm.cli.tune.measure import GroupResult, TuneOptions, host_count, measure_group, measure_sums
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import RankError, run_ranks
from dtcomm.measure import processor
from dtcomm.planner import parse as parse_table
from dtcomm.planner.cost_model import Table

COLUMNS = 9  # of sizes in the printed table
EPILOG = """\
Without torchrun, local ranks are started: 2, then 4 (--nproc). Under torchrun the ranks of the job are measured, on any
number of hosts, and where each has a GPU, also from which size on sums of inference are faster in a codec than NCCL's.
The table holds times by collective, algorithm, codec and size, the rates of codecs, and link
parameters derived from them. It is read when a communicator is created; all ranks use rank 0's. Results of other
numbers of ranks and hosts stay in the file. The search of DTCOMM_TRIALS begins anew with each run. DTCOMM_TUNE=FILE
names another table, which dtcomm.info()["table"] shows; DTCOMM_TUNE=off disables it. "direct", the default algorithm of
DDP and LocalSGD, reads no table."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 if a rank failed or an argument is wrong."""
    options = _parse(argv)
    launched = all(name in os.environ for name in LAUNCHER)
    begun = time.time()
    writes = not launched or os.environ["RANK"] == "0"
    used = _default_path()  # a rank of a job switches DTCOMM_TUNE off
    is_off = env.get("DTCOMM_TUNE") == "off"
    try:
        path = options.output or used
        # ValueError if the file is not a table, which must not be overwritten.
        reads = writes and not options.fresh and path.exists()
        earlier = parse_table(path.read_text(encoding="utf-8")) if reads else Table()
        results = _measure_as_rank(options) if launched else _measure_local_ranks(options)
        if not writes:
            return 0
        document: dict[str, Any] = {
            **_merged(earlier, results).as_dict(),
            "seconds": round(time.time() - begun, 1),
            "machine": {"node": platform.node(), "cores": os.cpu_count(), "processor": processor()[0]},
        }
        parse_table(json.dumps(document))  # never write a table that cannot be read
        if options.output is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(document, str(path))
    except (ValueError, TypeError, OSError, DtcommError, RankError) as error:
        print(f"dtcomm tune: {error}", file=sys.stderr)
        return 2
    if write_json(document, "-" if options.json else None):
        how = "uses it from now on" if path.resolve() == used.resolve() and not is_off else ""
        how = how or f"uses it in jobs with DTCOMM_TUNE={path.resolve()}"
        _show(results, f"Wrote {path} in {time.time() - begun:.0f} s; algorithm='auto' {how}.")
    return 0


def measure_rank(rank: int, world_size: int, options: TuneOptions) -> GroupResult | None:
    """Measure as one of the started ranks; rank 0 returns the result."""
    import_modules(options.imports)
    return measure_group(options)


def _measure_local_ranks(options: argparse.Namespace) -> list[GroupResult]:
    results: list[GroupResult] = []
    begun = time.time()
    for at, ranks in enumerate(options.nproc):
        # Time that one number of ranks did not use, or exceeded, changes the time of the next.
        left = max(0.0, options.seconds - (time.time() - begun)) / (len(options.nproc) - at)
        least = 0.5 * options.seconds / len(options.nproc)
        rank_options = replace(_options(options, max(left, least)), begun=time.time())
        environment = {"DTCOMM_TUNE": "off"}
        results += run_ranks(measure_rank, ranks, rank_options, timeout=None, fresh=True, env=environment)[:1]
    return results


def _measure_as_rank(options: argparse.Namespace) -> list[GroupResult]:
    os.environ["DTCOMM_TUNE"] = "off"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    try:
        result = measure_group(_options(options, options.seconds))
        thresholds = _measure_gpus(_options(options, options.seconds))
        return [] if result is None else [replace(result, compress_from=thresholds)]
    finally:
        dist.destroy_process_group()


def _measure_gpus(options: TuneOptions) -> tuple[tuple[str, int, int, float], ...]:
    """Measure sums of activations if every rank has a GPU."""
    number = int(os.environ.get("LOCAL_RANK", "0"))
    everywhere = torch.tensor(int(dist.is_nccl_available() and number < torch.cuda.device_count()))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if not everywhere:
        return ()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl", device_id=device)
    return measure_sums(options.codecs, options.largest, host_count(), device, group)


def _options(namespace: argparse.Namespace, seconds: float) -> TuneOptions:
    return TuneOptions(
        collectives=tuple(
            namespace.collective or ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
        ),
        codecs=tuple(split_codecs(namespace.codec or ("none", "int8"))),
        largest=namespace.maxbytes,
        seconds=seconds,
        imports=tuple(namespace.imports),
        quiet=namespace.json or not sys.stderr.isatty(),
    )


def _default_path() -> Path:
    setting = env.get("DTCOMM_TUNE")
    return Path(setting) if setting not in ("", "off") else env.tune_file()


def _merged(earlier: Table, results: Sequence[GroupResult]) -> Table:
    """Return the table: the results, and earlier rows of other groups."""
    groups = {(result.ranks, result.hosts) for result in results}
    kept = [row for row in earlier.measured if (row.ranks, row.hosts) not in groups]
    new = [row for result in results for row in result.compress_from]
    thresholds = {row[:3]: row for row in (*earlier.compress_from, *new)}
    links: dict[str, Any] = {name: link for result in results for name, link in result.links.items()}
    return Table(
        source=f"dtcomm tune on {platform.node()}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
        rates=results[-1].rates,
        measured=(*kept, *(row for result in results for row in result.measured)),
        compress_from=tuple(thresholds.values()),
        **links,
    )


def _show(results: Sequence[GroupResult], last_line: str) -> None:
    from rich.console import Console

    console = Console()
    console = Console(width=max(console.width, 118))
    for result in results:
        sizes = sorted({size for row in result.measured for size, _ in row.points})
        step = -(-len(sizes) // COLUMNS)
        sizes = sorted({*sizes[::-step]})
        title = f"{result.ranks} ranks on {result.hosts} host(s): the fastest algorithm, in us"
        shown = new_table(["collective", "codec", *(f">~{format_size(size)}" for size in sizes)], title)
        kinds: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
        for row in result.measured:
            by_size = kinds.setdefault((row.collective, row.codec), {})
            for size, seconds in row.points:
                by_size.setdefault(size, {})[row.algorithm] = seconds
        for kind, by_size in kinds.items():
            cells = []
            for size in sizes:
                best = min(known, key=lambda name: known[name]) if (known := by_size.get(size, {})) else ""
                cells.append(f"{known[best] * 1e6:,.0f}\n{best}" if best else "-")
            shown.add_row(*kind, *cells)
        console.print(shown)
        for codec, _, _, threshold in result.compress_from:
            faster = "at no size" if math.isinf(threshold) else f"from {format_size(int(threshold))} on"
            console.print(f"sums of activations on GPUs: {codec} is faster than NCCL {faster}")
    console.print(last_line, soft_wrap=True, markup=False)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dtcomm tune",
        description="Measure this machine, or this job, and write the table that algorithm=auto uses.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nproc", metavar="N", type=int, nargs="+", default=[2, 4],
        help="local ranks to start (default 2 4)")  # fmt: skip
    add("--output", "-o", metavar="FILE", type=Path,
        help="default: the file that DTCOMM_TUNE names, else one in the user's cache folder")  # fmt: skip
    add("--seconds", metavar="S", type=float, default=45.0, help="approximate total time (default 45)")
    add("--collective", metavar="NAME", action="append", choices=algorithms.collectives(),
        help="only this one; may be repeated (default: those with a choice of algorithms)")  # fmt: skip
    add("--codec", metavar="SPEC", action="append", help="repeated or a,b (default none and int8)")
    add("-e", "--maxbytes", metavar="SIZE", type=size_argument(1024), default=64 << 20,
        help="largest size (default 64M)")  # fmt: skip
    add_import_argument(add)
    add("--fresh", action="store_true", help="drop earlier results from the file")
    add("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args(argv)
    try:
        import_modules(options.imports)
    except ValueError as error:
        parser.error(str(error))
    if any(ranks < 2 for ranks in options.nproc):
        parser.error(f"--nproc {min(options.nproc)}: expected at least 2 ranks")
    if options.seconds <= 0:
        parser.error(f"--seconds {options.seconds:g}: expected more than 0")
    if options.output is not None:  # before minutes of measuring
        folder = options.output.absolute().parent
        if options.output.is_dir() or not folder.is_dir():
            what = "is a folder" if options.output.is_dir() else f"there is no folder {folder}"
            parser.error(f"--output {options.output}: {what}")
        if not os.access(options.output if options.output.exists() else folder, os.W_OK):
            parser.error(f"--output {options.output}: cannot be written")
    for spec in split_codecs(options.codec or ()):
        try:
            codecs.codec(spec)
        except ValueError as error:
            parser.error(str(error))
    return options
