"""The generated part of docs/results/workloads.md and its picture: tables of the units of bench.workloads.

The time to a fixed held-out loss is a number of steps, from the units with 2 workers, times the seconds of a step on a
link, from bench.workload_links. The loss is the one that the uncompressed run of the same seed has at 90 % of its
steps. Learning rates fall to a hundredth at the end of a run, so runs are not cut short: a method that has not reached
the loss by its last step counts as one that does not reach it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import pages
from bench.common.output import RESULTS
from bench.training.plan import SEEDS, planned
from bench.training.units import (
    VARIANCE_WARMUP_SHARE,
    VARIANTS,
    WORKERS,
    WORKLOADS,
    Unit,
    tried_rates,
)
from bench.training.workload import OPTIMIZERS, Workload
from bench.workload_links import AUTO, COMPUTE, RANKS, timed_as
from dtcomm.cli.plan import options as plan_options
from dtcomm.cli.plan import training as plan_training
from dtcomm.codecs import codec
from dtcomm.planner.cost_model import Table
from dtcomm.planner.sweep import MIN_SPEEDUP

Entry = Mapping[str, Any]
PICTURE = pages.DOCS / "results" / "workloads.png"
FARTHEST = 1.25  # times the uncompressed loss, in the picture
SHARE = 0.9  # of the uncompressed run's steps, at which it has the loss to be reached
BASELINE, SIXTEEN_BITS = "none", ("torch's fp16 hook", "torch's bf16 hook")
LABELS = {"none": "none (fp32)"}


class Kept:
    """The kept units, by workload, method, optimizer, workers and seed, and the trials of their learning rates."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.units: Mapping[str, Entry] = result["units"]
        self.trials: Mapping[str, Entry] = result["trials"]

    def seeds(self, workload: str, variant: str, optimizer: str, workers: int) -> dict[int, Entry]:
        """Return the units of all seeds that are kept."""
        entries = {}
        for seed in range(SEEDS):
            unit = Unit(workload=workload, variant=variant, optimizer=optimizer, workers=workers, seed=seed)
            if unit.key in self.units:
                entries[seed] = self.units[unit.key]
        return entries

    def variants(self, workload: str, optimizer: str) -> list[str]:
        """Return the methods of which a unit is kept, in their order."""
        return [
            name
            for name in VARIANTS
            if any(self.seeds(workload, name, optimizer, workers) for workers in WORKERS)
        ]


def summary(values: Sequence[float | None], shown: Callable[[float], str]) -> str:
    """Return the median of the seeds with the least and greatest; fewer seeds than planned and divergence are said."""
    if not values:
        return ""
    finite = sorted(value for value in values if value is not None)
    diverged = f"{len(values) - len(finite)} of {len(values)} diverged" if len(finite) < len(values) else ""
    if not finite:
        return diverged
    text = shown(statistics.median(finite))
    if len(finite) > 1:
        text += f" [{shown(finite[0])}–{shown(finite[-1])}]"
    notes = [diverged, f"{len(values)} seed{'s' if len(values) > 1 else ''}" if len(values) < SEEDS else ""]
    return text + (f" ({', '.join(note for note in notes if note)})" if any(notes) else "")


def steps_to(curve: Sequence[Sequence[Any]], target: float) -> float | None:
    """Return the step at which a curve first has the target, by a line between two points; None if it never has."""
    before: tuple[float, float] | None = None
    for step, loss, *_ in curve:
        if loss is None:
            return None
        if loss <= target:
            if before is None or before[1] == loss:
                return float(step)
            return before[0] + float((step - before[0]) * (before[1] - target) / (before[1] - loss))
        before = step, loss
    return None


def target_of(entry: Entry) -> float | None:
    """Return the loss of an uncompressed run at `SHARE` of its steps; None if it diverged."""
    curve = entry["curve"]
    point = min(curve, key=lambda point: abs(point[0] - SHARE * entry["steps"]))
    return None if point[1] is None else float(point[1])


def steps_by_seed(kept: Kept, workload: Workload, variant: str) -> dict[int, float | None]:
    """Return by seed the steps to the loss, with 2 workers and the usual optimizer; None: not reached."""
    baselines = kept.seeds(workload.name, BASELINE, workload.optimizer, RANKS)
    steps = {}
    for seed, entry in kept.seeds(workload.name, variant, workload.optimizer, RANKS).items():
        if seed in baselines and (target := target_of(baselines[seed])) is not None:
            steps[seed] = steps_to(entry["curve"], target)
    return steps


def rate_cell(kept: Kept, workload: Workload, variant: str, optimizer: str, rate: float) -> str:
    """Return a learning rate, and whether it is at an end of those that were tried: then another may be better."""
    unit = Unit(workload=workload.name, variant=variant, optimizer=optimizer, workers=RANKS, seed=0)
    tried = sorted(tried_rates(unit, kept.trials))
    end = {tried[0]: " (least tried)", tried[-1]: " (greatest tried)"}.get(rate, "") if tried else ""
    return f"{rate:g}{end}"


def quality_table(kept: Kept, workload: Workload, optimizer: str) -> str:
    """Return the table of held-out losses by method and number of workers."""
    columns = ["method", "rate", "sent", *(f"loss, {workers} workers" for workers in WORKERS)]
    columns.append(f"{workload.quality}, {WORKERS[0]} workers")
    lines = []
    for name in kept.variants(workload.name, optimizer):
        by_workers = [
            list(kept.seeds(workload.name, name, optimizer, workers).values()) for workers in WORKERS
        ]
        first = next(entries[0] for entries in by_workers if entries)
        cells = [summary([entry["loss"] for entry in entries], "{:.4f}".format) for entries in by_workers]
        qualities = [entry["quality"] if entry["loss"] is not None else None for entry in by_workers[0]]
        lines.append(
            [
                LABELS.get(name, name),
                rate_cell(kept, workload, name, optimizer, first["rate"]),
                f"{100 * first['sent']:.3g} %",
                *cells,
                summary(qualities, "{:.2f}".format),
            ]
        )
    return pages.markdown(columns, lines, aligned=True)


def reached(steps: Mapping[int, float | None]) -> str:
    """Return the median number of steps with its range, and of how many seeds."""
    if not steps:
        return ""
    values = [value for value in steps.values() if value is not None]
    if not values:
        return "not reached"
    text = f"{statistics.median(values):.0f}"
    if len(values) > 1:
        text += f" [{min(values):.0f}–{max(values):.0f}]"
    return text + (
        f" ({len(values)} of {len(steps)} seeds)" if len(steps) < SEEDS or len(values) < len(steps) else ""
    )


def relative_times(
    steps: Mapping[int, float | None], baseline: Mapping[int, float | None], faster: float, warmup: int = 0
) -> list[float]:
    """Return the times to the loss as multiples of uncompressed steps, by seed; empty unless all seeds reach it.

    Args:
        steps: The steps to the loss by seed; None: not reached.
        baseline: The uncompressed ones, by which those of their seed are divided.
        faster: How many times faster a step is than an uncompressed one.
        warmup: How many steps are uncompressed.
    """
    if None in steps.values():
        return []
    return [
        (min(warmup, value) + max(0.0, value - warmup) / faster) / base
        for seed, value in steps.items()
        if value is not None and (base := baseline.get(seed))
    ]


def auto_steps(kept: Kept, workload: Workload, chosen: str) -> dict[int, float | None]:
    """Return the steps of what "auto" has chosen: of the method of that name."""
    name = BASELINE if chosen in ("none", "plain DDP", "nothing yet") else chosen
    return steps_by_seed(kept, workload, name) if name in VARIANTS else {}


def verdict(faster: float) -> str:
    """Return whether a speed-up pays; as in ``dtcomm plan``, less than 1.1 times does not count."""
    return "pays" if faster > MIN_SPEEDUP else "does not pay"


@dataclass(frozen=True)
class TimeToLoss:
    """How a method reaches the loss on a link.

    Attributes:
        name: The method.
        row: Its step on the link.
        steps: The steps to the loss by seed; None: not reached.
        times: The times by seed, as multiples of the uncompressed ones; empty unless all seeds reach the loss.
        fastest: The least time, with the fastest of the measured steps.
        slowest: The greatest time, with the slowest of them.
    """

    name: str
    row: Entry
    steps: Mapping[int, float | None]
    times: list[float]
    fastest: float
    slowest: float

    @classmethod
    def of(
        cls,
        name: str,
        row: Entry,
        steps: Mapping[int, float | None],
        baseline: Mapping[int, float | None],
        warmup: int = 0,
    ) -> TimeToLoss:
        """Return it for the steps of a method and the uncompressed ones; see `relative_times`."""
        low, high = row.get("faster_range", (row["faster"], row["faster"]))
        times, fastest, slowest = (
            relative_times(steps, baseline, faster, warmup) for faster in (row["faster"], high, low)
        )
        return cls(name, row, steps, times, min(fastest, default=math.inf), max(slowest, default=math.inf))

    @property
    def median(self) -> float:
        """The median time over seeds; infinite if the loss is not reached by all."""
        return statistics.median(self.times) if self.times else math.inf


def link_lines(
    kept: Kept, workload: Workload, rows: Iterable[Entry], predicted: Mapping[str, float]
) -> list[list[str]]:
    """Return the lines of the table of a workload and a link, fastest first, those that do not reach the loss last.

    Times are compared as the steps were measured: a step by its ratio to the uncompressed step of the same run.
    ``predicted`` is the planner's ratio, by the variant whose steps are measured.
    """
    listed = list(rows)
    of_name = {row["name"]: row for row in listed}
    if BASELINE not in of_name:
        return []
    baseline = steps_by_seed(kept, workload, BASELINE)
    times: list[TimeToLoss] = []
    for name in kept.variants(workload.name, workload.optimizer):
        row = of_name.get(timed_as(VARIANTS[name]))
        if row is not None and (steps := steps_by_seed(kept, workload, name)):
            # Until the variance is frozen, steps are uncompressed.
            warmup = workload.steps // VARIANCE_WARMUP_SHARE if VARIANTS[name].frozen else 0
            times.append(TimeToLoss.of(name, row, steps, baseline, warmup))
    for row in listed:
        if row["name"] == AUTO and (steps := auto_steps(kept, workload, row["chosen"])):
            runs = f", {row['measurements']} of the runs" if "measurements" in row else ""
            times.append(TimeToLoss.of(f"auto: {row['chosen']}{runs}", row, steps, baseline))
    medians = {time.name: time.median for time in times if time.times}
    sixteen = [medians[name] for name in SIXTEEN_BITS if name in medians]
    unit = of_name[BASELINE]["ms"] / 1e3 * statistics.median(filter(None, baseline.values()))
    lines = []
    for time in sorted(times, key=lambda time: time.median):
        name, row = time.name, time.row
        gain = predicted.get(row["name"])
        planned = f"{gain:.2f}×, {verdict(gain)}" if gain is not None else "–"
        cells = ["not reached", "", "", "does not pay"]
        if time.times:
            low, high = f"{1 / time.slowest:.2f}", f"{1 / time.fastest:.2f}"
            cells = [
                f"{time.median * unit:.0f} s",
                f"{1 / time.median:.2f}×" + (f" [{low}–{high}]" if low != high else ""),
                f"{min(sixteen) / time.median:.2f}×" if sixteen else "",
                verdict(1 / time.median),
            ]
        if name == BASELINE:
            planned, cells[3] = "–", "–"
        if name in VARIANTS and VARIANTS[name].frozen:
            planned = "–"  # it predicts a step, and these runs have two kinds
        lines.append(
            [
                LABELS.get(name, name),
                reached(time.steps),
                f"{row['ms']:.1f} ({row['faster']:.2f}×{pages.spread(dict(row), 'faster', '{:.2f}'.format)})",
                *cells[:3],
                planned,
                cells[3],
            ]
        )
    return lines


LINK_COLUMNS = (
    "method",
    "steps to the loss",
    "ms a step (beside fp32)",
    "time to the loss",
    "beside fp32",
    "beside torch's better 16-bit hook",
    "planner, by step",
    "measured, to the loss",
)


def losers(lines: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Return the methods that do not reach the loss, and those that reach it later than torch's better 16-bit hook."""
    missed = [line[0] for line in lines if line[3] == "not reached"]
    later = [line[0] for line in lines if line[5] and float(line[5].rstrip("×")) < 0.995]
    return missed, [name for name in later if name not in ("none (fp32)", *SIXTEEN_BITS)]


def verdicts(lines: Sequence[Sequence[str]]) -> str:
    """Return a sentence about the planner's verdicts beside the measured ones.

    The planner predicts steps. Of a method that does not reach the loss it cannot know that, so these are counted
    apart.
    """
    planned, measured = (LINK_COLUMNS.index(name) for name in ("planner, by step", "measured, to the loss"))
    judged = [line for line in lines if "–" not in (line[planned], line[measured])]
    right = [line for line in judged if line[planned].endswith(f", {line[measured]}")]
    reached, never = (
        [line for line in judged if (line[3] == "not reached") == missed] for missed in (False, True)
    )
    return (
        f"The planner's verdict is the measured one in {sum(line in right for line in reached)} of {len(reached)} rows "
        f"that reach the loss, and in {sum(line in right for line in never)} of {len(never)} that do not."
    )


def predictions(parameters: int, compute: float, gbit: float, names: list[str]) -> dict[str, float]:
    """Return by variant how many times faster its step is than an uncompressed one, as ``dtcomm plan`` predicts.

    PowerSGD, DGC and EF21 have no prediction: the planner knows codecs.

    Args:
        parameters: Number of parameters.
        compute: Seconds of a step without communication.
        gbit: The rate of the link.
        names: Variants.
    """
    specs = {}
    for name in names:
        variant = VARIANTS[name]
        spec = variant.hook or variant.method.spec
        if variant.method.feedback != "residual":
            continue
        try:
            specs[name] = str(codec(spec))
        except ValueError:
            continue
    options = plan_options.parse(
        ["--between", f"{gbit:g}gbit", "--device", "cpu", "--hosts", str(RANKS), "--per-host", "1"]
        + ["--model", f"params={parameters},step_ms={compute * 1e3:.6g}"]
        + [argument for spec in dict.fromkeys(specs.values()) for argument in ("--codec", spec)]
    )
    rows = {str(row.codec): row.speedup for row in plan_training.of_model(options, Table(), "").rows}
    return {name: round(rows[spec], 3) for name, spec in specs.items() if spec in rows}


def prediction_errors(rows: Iterable[Entry], predicted: Mapping[str, float]) -> list[float]:
    """Return by how much, relative to it, the planner's gain of each measured step is too great."""
    return [
        predicted[row["name"]] / row["faster"] - 1
        for row in rows
        if row["name"] in predicted and row["name"] != BASELINE
    ]


def read(program: str) -> dict[str, Any]:
    """Return the kept result of a program; an empty one if nothing is kept yet."""
    path = RESULTS / f"{program}.json"
    result: dict[str, Any] = {"units": {}, "trials": {}, "rows": []}
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
    return result


def kept_page() -> str:
    """Return the text between the marks of docs/results/workloads.md."""
    return page(read("workloads"), read("workload_links"))


def page(result: dict[str, Any], links: dict[str, Any]) -> str:
    """Return the text that follows from the results of bench.workloads and bench.workload_links."""
    kept = Kept(result)
    plan = planned()
    number = sum(unit.key in kept.units for unit in plan)
    parts = [
        f"**{number} of {len(plan):,} units are kept**; `python -m bench.workloads --list` names the missing ones."
    ]
    if kept.units:
        parts.append(f"![held-out loss by the share of bytes sent]({PICTURE.name})")
    if not links["rows"]:
        parts.append("The steps on links are not measured yet, so there is no time to the loss.")
    for workload in WORKLOADS.values():
        parts += _of_workload(kept, workload, links)
    parts += [
        pages.provenance(of_program) for of_program in (result, links) if of_program.get("measurements")
    ]
    return "\n\n".join(parts)


def _of_workload(kept: Kept, workload: Workload, links: Mapping[str, Any]) -> list[str]:
    entries = [entry for key, entry in kept.units.items() if key.startswith(f"{workload.name} | ")]
    if not entries:
        return [f"## {workload.title}", "No unit is kept yet."]
    parts = [f"## {workload.title}"]
    parts.append(
        f"{entries[0]['steps']:,} steps of {workload.samples} samples. "
        f"Data: {'; '.join(sorted({entry['data'] for entry in entries}))}. Losses are held out, in {workload.unit}."
    )
    for optimizer in sorted(OPTIMIZERS, key=lambda name: name != workload.optimizer):
        if kept.variants(workload.name, optimizer):
            parts += [f"### {_OPTIMIZERS[optimizer]}", quality_table(kept, workload, optimizer)]
    all_rows = [row for row in links["rows"] if row["workload"] == workload.name]
    for gbit in sorted({row["gbit"] for row in all_rows}):
        rows = [row for row in all_rows if row["gbit"] == gbit]
        compute = next(row["ms"] for row in rows if row["name"] == COMPUTE) * 1e-3
        names = [row["name"] for row in rows if row["name"] in VARIANTS]
        predicted = predictions(entries[0]["parameters"], compute, gbit, names)
        lines = link_lines(kept, workload, rows, predicted)
        if not lines:
            continue
        parts += [f"### Time to the loss at {gbit:g} Gbit/s, {_OPTIMIZERS[workload.optimizer]}, 2 workers"]
        parts.append(pages.markdown(LINK_COLUMNS, lines, aligned=True))
        missed, later = losers(lines)
        errors = prediction_errors(rows, predicted)
        parts.append(
            f"Not reached by: {'; '.join(missed) or 'none'}. Later than torch's better 16-bit hook: "
            f"{'; '.join(later) or 'none'}. {verdicts(lines)} Its gains of the steps are wrong by "
            f"{100 * statistics.median(map(abs, errors)):.0f} % in the median, and by {100 * min(errors):+.0f} to "
            f"{100 * max(errors):+.0f} %."
        )
    return parts


_OPTIMIZERS = {"sgd": "SGD with momentum", "adamw": "AdamW"}


def kept_picture() -> list[Path]:
    """Draw the picture of the kept units; nothing if there are none."""
    result = read("workloads")
    return [picture(result, PICTURE)] if result["units"] else []


def picture(result: dict[str, Any], path: Path) -> Path:
    """Plot the held-out loss by the share of bytes sent, with 2 workers; a panel for each workload with units."""
    from dtcomm.cli._plot import COLOURS, styled_pyplot

    kept = Kept(result)
    shown = [workload for workload in WORKLOADS.values() if kept.variants(workload.name, workload.optimizer)]
    with styled_pyplot() as pyplot:
        figure, panels = pyplot.subplots(
            1,
            max(1, len(shown)),
            figsize=(4.6 * max(1, len(shown)), 4.4),
            layout="constrained",
            squeeze=False,
        )
        for axes, workload in zip(panels[0], shown):
            baseline = _finite(kept, workload, BASELINE)
            if baseline:
                axes.axhspan(min(baseline), max(baseline), color=COLOURS[0], alpha=0.4, linewidth=1)
            most = FARTHEST * max(baseline, default=math.inf)
            points: list[tuple[float, float, str, str]] = []  # loss, share of bytes, name, colour
            for name in kept.variants(workload.name, workload.optimizer):
                entries = kept.seeds(workload.name, name, workload.optimizer, RANKS)
                losses = _finite(kept, workload, name)
                if not losses:
                    continue
                variant = VARIANTS[name]
                colour = COLOURS[2] if variant.frozen else COLOURS[1] if variant.feedback else COLOURS[3]
                plain = name == BASELINE or bool(variant.hook)
                colour, ink = (COLOURS[0], "0.3") if plain else (colour, colour)  # grey is on grey
                sent = 100 * next(iter(entries.values()))["sent"]
                loss, label = statistics.median(losses), name.removesuffix(", no feedback")
                if loss > most:  # an arrow at the edge, so that the others can be told apart
                    axes.scatter([sent], [most], s=26, color=colour, marker="^", zorder=3)
                    points.append((most, sent, f"{label}: {loss:.2f}", ink))
                    continue
                axes.plot([sent, sent], [min(losses), max(losses)], color=colour, linewidth=1.3)
                axes.scatter([sent], [loss], s=26, color=colour, zorder=3)
                # Names of all points that end like fp32 would fill the frame.
                like_fp32 = bool(baseline) and name != BASELINE and min(baseline) <= loss <= max(baseline)
                points.append((loss, sent, "" if like_fp32 else label, ink))
            axes.set_xscale("log")
            axes.set_xlim(0.5, 600)  # with room for the labels of what sends everything
            axes.set_xticks([1, 10, 100], ["1", "10", "100"])
            _label(axes, points)
            axes.set_title(workload.title)
            axes.set_xlabel("sent, % of uncompressed")
            axes.set_ylabel(f"held-out loss, {workload.unit}")
            axes.grid(axis="y")
        figure.suptitle(
            "2 workers. Blue: with feedback. Orange: without. Green: frozen variance. Grey: fp32, with its range, and "
            "torch's hooks.\nArrow: above the frame, with its loss. Without a name: within fp32's range.",
            fontsize=9.5,
            x=0.01,
            ha="left",
        )
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)
    return path


def _label(axes: Any, points: list[tuple[float, float, str, str]]) -> None:
    """Write the names of points beside them, in their colours, from the lowest loss up, none over another.

    Lines lead to names that are above their points.
    """
    low, high = axes.get_ylim()
    height, width = 0.04 * (high - low), 0.045  # of a line, and of a character on the axis of powers of ten
    right = math.log10(1.15)  # of a point's middle, where its name begins
    # What names must not cover, the points first: loss, first and last power of ten.
    placed = [(loss, math.log10(sent) - right / 2, math.log10(sent) + right / 2) for loss, sent, *_ in points]
    for loss, sent, name, colour in sorted(points, key=lambda point: (point[0], -point[1])):
        if not name:
            continue
        begin = math.log10(sent) + right
        at, end = loss, begin + width * len(name)
        for other, other_begin, other_end in sorted(placed):
            if begin < other_end and other_begin < end and abs(at - other) < height:
                at = other + height
        placed.append((at, begin, end))
        axes.text(10**begin, at, name, fontsize=7, verticalalignment="center", color=colour)
        if at > loss:
            axes.plot([sent, 10**begin], [loss, at], color="0.6", linewidth=0.6, zorder=1)
    axes.set_ylim(low, max(high, *(at + height for at, _, _ in placed)))


def _finite(kept: Kept, workload: Workload, variant: str) -> list[float]:
    entries = kept.seeds(workload.name, variant, workload.optimizer, RANKS).values()
    return [entry["loss"] for entry in entries if entry["loss"] is not None]
