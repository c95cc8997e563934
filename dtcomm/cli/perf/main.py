"""``dtcomm perf all_reduce …``: nccl-tests for dtcomm, and for what it is compared with.

To read on: perf_flags, perf_options and perf_device (the flags), perf_run and perf_bench (what a rank does),
perf_virtual (virtual ranks), perf_measure (how often, by dtcomm.measure.device_clock), perf_check (right or wrong),
perf_backend, perf_backends, perf_ours, perf_torch and perf_mpi (who does the work), perf_host and perf_place (where),
perf_report (what is found), perf_table, perf_json, perf_plot, perf_live and perf_progress (what is shown).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dtcomm.cli.perf import virtual
from dtcomm.cli.perf.options import Options, parse
from dtcomm.cli.perf.output.json_output import to_csv, to_json
from dtcomm.cli.perf.output.plot import plot
from dtcomm.cli.perf.output.progress import Printer
from dtcomm.cli.perf.report import Listener, Report
from dtcomm.cli.perf.runner import run
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import RankError, run_ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: list[str]) -> int:
    """0 where all values are right, 1 where one is wrong, 2 where a rank failed (or the arguments are wrong)."""
    options = parse(argv)
    launched = all(name in os.environ for name in LAUNCHER)
    try:
        report = _measured(options, launched)
    except BrokenPipeError:
        raise
    except Exception as error:
        expected = isinstance(error, ValueError | TypeError | DtcommError | RankError)
        detail = "" if expected or error.__cause__ is None else f"{error.__cause__}\n"
        print(f"{detail}dtcomm perf: {error}", file=sys.stderr)
        return 2
    if not launched or os.environ["RANK"] == "0":
        _write(options.json, lambda: to_json(report, argv))
        _write(options.csv, lambda: to_csv(report))
        if options.plot is not None:
            plot(report, Path(options.plot))
            print(f"# {options.plot}", file=sys.stderr)
    return 1 if report.wrong else 0


def measure(rank: int, world_size: int, options: Options) -> Report | None:
    """The benchmark as one of the ranks that ``--nproc`` starts; rank 0 returns what was found."""
    report = run(options, Printer(options) if rank == 0 else Listener())
    return report if rank == 0 else None


def _measured(options: Options, launched: bool) -> Report:
    if not options.virtual:
        return _as_rank(options) if launched else _own_ranks(options)
    if launched:
        raise ValueError(f"--virtual {options.virtual}: is for one process, and a launcher started this one")
    return virtual.run(options, Printer(options))


def _own_ranks(options: Options) -> Report:
    report = run_ranks(measure, options.nproc, options, timeout=None, fresh=True)[0]
    assert isinstance(report, Report)
    return report


def _as_rank(options: Options) -> Report:
    """Under torchrun: this process is one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    try:
        return run(options, Printer(options) if dist.get_rank() == 0 else Listener())
    finally:
        dist.destroy_process_group()


def _write(target: str | None, text: Callable[[], str]) -> None:
    if target == "-":
        sys.stdout.write(text())
        sys.stdout.flush()
    elif target is not None:
        Path(target).write_text(text())
