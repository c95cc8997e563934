"""Command ``dtcomm plan``: predict collective times on hardware you do not own, and whether a codec would pay.

`options` has the flags, `dtcomm.planner` the models, `report` and `plot` the output, and `memory` is ``--memory``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from dtcomm import env
from dtcomm.cli.plan import memory, plot, report
from dtcomm.cli.plan.options import Options, parse
from dtcomm.cli.plan.training import Training, of_model, of_record
from dtcomm.cli.tune import cpu_placement
from dtcomm.planner import parse as parse_table
from dtcomm.planner.cost_model import Table
from dtcomm.planner.sweep import Sweep, run_sweep


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 if an argument or a file is wrong."""
    options = parse(argv)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("dtcomm plan: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    if options.memory is not None:
        return memory.main(options)
    try:
        table = _table(options)
        plan = run_sweep(
            options.system,
            options.collective,
            options.sizes,
            options.codecs,
            options.algorithms,
            options.dtype,
            table,
            cpu_placement.placement() if options.system.name == "local" and table.measured else "",
        )
        trainings: list[Training] = []
        if options.model is not None:
            trainings.append(of_model(plan, options.model, options.codecs))
        if options.record is not None:
            trainings.append(of_record(plan, options.record, options.codecs))
    except ValueError as error:
        print(f"dtcomm plan: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        text = json.dumps(as_dict(plan, trainings), indent=1, allow_nan=False) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    if options.json != "-":
        report.show(plan, trainings)
    if options.plot is not None:
        plot.plot(plan, trainings, options.plot)
        print(f"Wrote {options.plot}", file=sys.stderr)
    return 0


def _table(options: Options) -> Table:
    # The user's table was measured on this machine and does not apply to other systems.
    if options.table is not None:
        return parse_table(options.table.read_text())
    return parse_table(env.tune_text() if options.system.name == "local" else "")


def as_dict(plan: Sweep, trainings: list[Training]) -> dict[str, Any]:
    """Return JSON values; times in microseconds, bandwidths in GB/s (1e9)."""
    return {
        "version": 1,
        "system": plan.system.as_dict(),
        "table": plan.table.source,
        "placement": plan.placement,
        "collective": plan.collective,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "results": [row.as_dict() for row in plan.rows],
        "alternatives": [other.as_dict() for row in plan.rows for other in row.others],
        "break_even_bytes": plan.break_even,
        "verdicts": plan.verdicts,
        "not_estimated": plan.skipped,
        **{training.kind: training.as_dict() for training in trainings},
    }
