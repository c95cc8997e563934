"""``dtcomm trace``: the ranks' timelines as one, with a table, advice and a picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dtcomm.profiling import trace
from dtcomm.profiling.summary import summarize


def main(argv: list[str]) -> int:
    """Returns 2 where a file is no trace of dtcomm's, or none of its steps is whole."""
    parser = argparse.ArgumentParser(
        prog="dtcomm trace",
        description="Merge the traces that state.trace(path) wrote on every rank, and say what is in them.",
    )
    parser.add_argument(
        "traces", nargs="+", type=Path, help="trace.rank*.json, and torch.profiler's of the same host"
    )
    parser.add_argument("-o", "--output", type=Path, help="the merged trace, for ui.perfetto.dev")
    parser.add_argument("--plot", type=Path, help="a picture of one step of all ranks")
    parser.add_argument("--step", type=int, help="the step to draw (default: the one of median length)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    try:
        ranks = trace.read(options.traces)
        if not ranks:
            raise ValueError("none of the files is a trace of dtcomm's")
        found = {about["rank"]: summarize(steps) for about, steps in ranks}
        if options.output:
            trace.merge(options.traces, options.output)
        if options.plot:
            from dtcomm.cli.trace_plot import plot

            plot(ranks, options.plot, options.step)
    except (OSError, ValueError) as error:
        print(f"dtcomm trace: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"ranks": {str(rank): summary.to_dict() for rank, summary in found.items()}}))
        return 0
    for rank, summary in found.items():
        print(f"rank {rank}\n{summary}\n")
    for path, what in ((options.output, "all ranks"), (options.plot, "a picture")):
        if path:
            print(f"{what}: {path}")
    return 0
