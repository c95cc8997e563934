"""Command ``dtcomm trace``: merge the ranks' timelines, and print a table and advice."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dtcomm.profiling import trace
from dtcomm.profiling.summary import summarize


def main(argv: list[str]) -> int:
    """Run the command; return 0, or 2 if no file is a trace of dtcomm or no step is complete."""
    parser = argparse.ArgumentParser(
        prog="dtcomm trace",
        description="Merge the traces that state.trace(path) wrote on every rank, and summarize them.",
    )
    parser.add_argument(
        "traces", nargs="+", type=Path, help="trace.rank*.json, and traces of torch.profiler on the same host"
    )
    parser.add_argument("-o", "--output", type=Path, help="write the merged trace, for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    try:
        ranks = trace.read(options.traces)
        if not ranks:
            raise ValueError("none of the files is a trace of dtcomm")
        summaries = {about["rank"]: summarize(steps) for about, steps in ranks}
        if options.output:
            trace.merge(options.traces, options.output)
    except (OSError, ValueError) as error:
        print(f"dtcomm trace: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"ranks": {str(rank): summary.to_dict() for rank, summary in summaries.items()}}))
        return 0
    for rank, summary in summaries.items():
        print(f"rank {rank}\n{summary}\n")
    if options.output:
        print(f"merged trace: {options.output}")
    return 0
