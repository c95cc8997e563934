"""Command ``dtcomm perf``: an nccl-tests for dtcomm and its peers.

A measurement goes through `main`, `runner.run` on every rank, `runner.CaseBench.measure`, `timing.time_operation` and
`backend.Backend.bind`.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dtcomm.cli import LAUNCHER, write_json
from dtcomm.cli.perf.args import PerfOptions, import_modules, parse
from dtcomm.cli.perf.output import Printer, as_dict, write_plot
from dtcomm.cli.perf.runner import PerfReport, ProgressListener, run
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import RankError, run_ranks


def main(argv: list[str]) -> int:
    """Run the command; return 0, 1 if a value is wrong, or 2 if a rank failed or an argument is wrong."""
    options = parse(argv)
    launched = all(name in os.environ for name in LAUNCHER)
    try:
        report = _run_as_rank(options) if launched else _run_on_local_ranks(options)
    except BrokenPipeError:
        raise
    except Exception as error:
        expected = isinstance(error, ValueError | TypeError | DtcommError | RankError)
        detail = "" if expected or error.__cause__ is None else f"{error.__cause__}\n"
        print(f"{detail}dtcomm perf: {error}", file=sys.stderr)
        return 2
    if not launched or os.environ["RANK"] == "0":
        write_json(as_dict(report, argv), options.json)
        if options.plot is not None:
            write_plot(report, Path(options.plot))
            print(f"# {options.plot}", file=sys.stderr)
    return 1 if report.wrong else 0


def measure(rank: int, world_size: int, options: PerfOptions) -> PerfReport | None:
    """Run the benchmark as a rank that ``--nproc`` started; rank 0 returns the report."""
    import_modules(options.imports)
    report = run(options, Printer(options) if rank == 0 else ProgressListener())
    return report if rank == 0 else None


def _run_on_local_ranks(options: PerfOptions) -> PerfReport:
    report = run_ranks(measure, options.nproc, options, timeout=None, fresh=True)[0]
    assert isinstance(report, PerfReport)
    return report


def _run_as_rank(options: PerfOptions) -> PerfReport:
    """Run as a rank that torchrun started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    try:
        return run(options, Printer(options) if dist.get_rank() == 0 else ProgressListener())
    finally:
        dist.destroy_process_group()
