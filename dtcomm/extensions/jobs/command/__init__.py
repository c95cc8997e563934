"""Command ``dtcomm plan``: predict collective times on hardware you do not own, and whether a codec would pay.

`flags` and `options` read the command line, `training` has training steps, `job` whole jobs, `links` unlike links, and
`report` the output.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from dtcomm import env
from dtcomm.cli import write_json
from dtcomm.cli.tune import measure as tune_measure
from dtcomm.extensions.jobs.command import job, links, report
from dtcomm.extensions.jobs.command.options import PlanOptions, parse
from dtcomm.extensions.jobs.command.training import Training, of_model, of_record
from dtcomm.extensions.jobs.sweep import Sweep, run_sweep
from dtcomm.planner import parse as parse_table
from dtcomm.planner.cost_model import Table


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 if an argument or a file is wrong."""
    options = parse(argv)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("dtcomm plan: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    try:
        return _run(options)
    except ValueError as error:
        print(f"dtcomm plan: {error}", file=sys.stderr)
        return 2


def _run(options: PlanOptions) -> int:
    if options.memory is not None:
        report.estimate_memory(options)
        return 0
    if options.job is not None:
        return job.plan_job(options)
    table = _table(options)
    if options.links is not None:
        links.plan(options.links, table, options.json)
        return 0
    placement = tune_measure.cpu_placement() if options.system.name == "local" and table.measured else ""
    training = None
    if options.model is not None:
        training = of_model(options, table, placement)
    elif options.record is not None:
        training = of_record(options, table, placement)
    if training is not None:
        sweeps = [messages.sweep for messages in training.messages]
    else:
        what = options.collective, options.sizes, options.codecs, options.algorithms, options.dtype
        sweeps = [run_sweep(options.system, *what, table, placement)]
    if write_json(as_dict(sweeps, training), options.json):
        report.print_plan(sweeps, training)
    if options.plot is not None:
        report.plot(sweeps, training, options.plot)
        print(f"Wrote {options.plot}", file=sys.stderr)
    return 0


def _table(options: PlanOptions) -> Table:
    # The user's table was measured on this machine and does not apply to other systems.
    if options.table is not None:
        return parse_table(options.table.read_text())
    return parse_table(env.tune_text() if options.system.name == "local" else "")


def as_dict(sweeps: Sequence[Sweep], training: Training | None) -> dict[str, Any]:
    """Return JSON values; times in microseconds, bandwidths in GB/s (1e9)."""
    first = sweeps[0]
    rows = [row for sweep in sweeps for row in sweep.rows]
    return {
        "version": 1, "system": first.system.as_dict(), "table": first.table.source, "placement": first.placement,
        "collective": first.collective, "dtype": str(first.dtype).removeprefix("torch."),
        "results": [row.as_dict() for row in rows],
        "alternatives": [other.as_dict() for row in rows for other in row.others],
        "break_even_bytes": first.break_even, "verdicts": first.verdicts if training is None else [training.verdict],
        "assumptions": first.assumptions if training is None else training.assumptions,
        "not_estimated": sorted({name for sweep in sweeps for name in sweep.skipped}),
        **({} if training is None else {training.kind: training.as_dict()}),
    }  # fmt: skip
