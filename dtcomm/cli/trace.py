"""Command ``dtcomm trace``: merge the ranks' timelines, print a table and advice, and plot one step."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtcomm.cli import COLOURS, GREY, INK, styled_pyplot
from dtcomm.profiling import trace
from dtcomm.profiling.summary import summarize
from dtcomm.profiling.trace import MessageRecord, StepRecord
from dtcomm.system import save_figure

COMPUTE = {"forward": "#b9c4d6", "backward": "#7d8fb0"}
PHASES = dict(zip(("encode", "reduce", "decode", "factors"), COLOURS[1:]))
MAX_BUCKETS = 24
Ranks = Sequence[tuple[dict[str, Any], list[StepRecord]]]


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
    parser.add_argument("--plot", type=Path, help="plot one step of all ranks")
    parser.add_argument("--step", type=int, help="the step to plot (default: the one of median length)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    try:
        ranks = trace.read(options.traces)
        if not ranks:
            raise ValueError("none of the files is a trace of dtcomm")
        summaries = {about["rank"]: summarize(steps) for about, steps in ranks}
        if options.output:
            trace.merge(options.traces, options.output)
        if options.plot:
            plot(ranks, options.plot, options.step)
    except (OSError, ValueError) as error:
        print(f"dtcomm trace: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"ranks": {str(rank): summary.to_dict() for rank, summary in summaries.items()}}))
        return 0
    for rank, summary in summaries.items():
        print(f"rank {rank}\n{summary}\n")
    for path, description in ((options.output, "merged trace"), (options.plot, "plot")):
        if path:
            print(f"{description}: {path}")
    return 0


def plot(ranks: Ranks, path: Path, number: int | None = None) -> None:
    """Plot one step in the format of the path's extension; ValueError if the step is not complete on all ranks."""
    from matplotlib.patches import Patch

    chosen = median_step(ranks) if number is None else number
    rows: list[tuple[str, StepRecord, MessageRecord | None]] = []
    for about, steps in ranks:
        step = next((step for step in steps if step.number == chosen and step.length), None)
        if step is None:
            raise ValueError(f"step {chosen} of rank {about['rank']} is not in its trace, or not complete")
        rows.append((f"rank {about['rank']}: compute", step, None))
        rows += [(message.label, step, message) for message in step.messages[:MAX_BUCKETS]]
    origin = min(step.begin for _, step, _ in rows)
    with styled_pyplot() as pyplot:
        figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.32 * len(rows)), layout="constrained")
        for at, (_, step, message) in enumerate(rows):
            if message is None:
                _draw_compute(axes, at, step, origin)
            else:
                _draw_message(axes, at, message, origin)
        axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.set_title(f"step {chosen}: {_summary(rows)}", loc="left")
        seen = {span.phase for _, _, message in rows if message for span in message.spans}
        legend = {
            **COMPUTE,
            "waiting for communication": "#d6453d",
            "queued": "white",
            "in flight": "#e4e7ec",
            **{phase: colour for phase, colour in PHASES.items() if phase in seen},
        }
        axes.legend(
            handles=[Patch(facecolor=colour, edgecolor=GREY, label=name) for name, colour in legend.items()],
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            frameon=False,
        )
        save_figure(figure, path)
        pyplot.close(figure)


def median_step(ranks: Ranks) -> int:
    """Return the step of median length on the first rank, of those that are complete on all ranks."""
    common = set.intersection(*({step.number for step in steps if step.length} for _, steps in ranks))
    if not common:
        raise ValueError("the ranks have no complete step in common")
    lengths = {step.number: step.length for step in ranks[0][1] if step.number in common}
    middle = statistics.median_low(lengths.values())
    return next(number for number, length in lengths.items() if length == middle)


def _draw_compute(axes: Any, at: int, step: StepRecord, origin: int) -> None:
    for kind, intervals in (("forward", step.forward), ("backward", step.backward)):
        for interval in intervals:
            _bar(axes, at, interval, origin, color=COMPUTE[kind])
    for message in step.messages:
        _bar(axes, at, message.waited, origin, color="#d6453d")


def _draw_message(axes: Any, at: int, message: MessageRecord, origin: int) -> None:
    _bar(axes, at, (message.ready, message.started), origin, color="white", edgecolor=GREY, linewidth=0.6)
    _bar(axes, at, (message.started, message.done), origin, color="#e4e7ec", edgecolor=GREY, linewidth=0.6)
    # Phases of chunks overlap, so each has its own lane; the dark part is the share of time in which it was active.
    lanes = list(dict.fromkeys(span.phase for span in message.spans))
    height = 0.8 / max(3, len(lanes))
    for span in message.spans:
        width = span.end_ns - span.begin_ns
        top = -0.4 + lanes.index(span.phase) * height
        if width > 0:
            place = {"left": (span.begin_ns - origin) * 1e-6, "height": height}
            for length, alpha in ((width, 0.25), (span.busy_ns, 1.0)):
                colour = PHASES.get(span.phase, INK)
                axes.barh(at + top + height / 2, length * 1e-6, **place, color=colour, alpha=alpha)


def _bar(axes: Any, at: int, interval: tuple[int, int], origin: int, **style: Any) -> None:
    begin, end = interval
    if begin and end > begin:
        axes.barh(at, (end - begin) * 1e-6, left=(begin - origin) * 1e-6, height=0.8, **style)


def _summary(rows: Sequence[tuple[str, StepRecord, MessageRecord | None]]) -> str:
    steps = [step for _, step, message in rows if message is None]
    length = statistics.median(step.length for step in steps) * 1e-6
    exposed = max(step.exposed for step in steps) * 1e-6
    hidden = max(step.hidden for step in steps) * 1e-6
    return f"{length:.1f} ms; communication hidden for {hidden:.1f} ms, exposed for {exposed:.1f} ms"
