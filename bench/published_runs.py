"""Compare steps that `dtcomm plan` predicts for whole jobs with published training runs.

python -m bench.published_runs [--fit] [--json FILE]

The rows are in bench/published_runs_data.json, each with its source. Every second row of llm-foundry's tables was used
to fit the constants of dtcomm/planner/job/compute.py; ``--fit`` fits them again and prints them. All other rows were
not used, and their errors are reported apart.

Target: a median error of at most 15 % of the throughput over the rows that were not used. The exit status is 1 if it is
missed. It takes a few seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common import output, pages
from dtcomm.planner.hardware import System, find_system
from dtcomm.planner.job import Job, JobStep, Layout, ModelShape, Network, compute, find_model, job_step

DATA = Path(__file__).with_name("published_runs_data.json")
MOST_ERROR = 0.15
CHUNKS = (1, 2, 3, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8)
FACTORS = (0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25)  # by which a constant is changed while it is fitted
NAMES = {
    "llm-foundry": "MosaicML llm-foundry, MPT 125M to 70B, FSDP",
    "megatron-2021": "Megatron-LM 2021, GPT 1.7B to 1T, TP x PP x DP",
    "korthikanti-2022": "Megatron-LM 2022, GPT 22B to 1T, TP x PP",
    "llama3-2024": "Llama 3 405B, TP x CP x PP x FSDP",
    "torchtitan-2024": "torchtitan, Llama 3 8B, FSDP (500 W)",
    "torchtitan-2025": "torchtitan, Llama 3 8B and 70B, FSDP x TP (500 W)",
}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A published run beside its prediction. ``error`` is that of the throughput."""

    row: dict[str, Any]
    predicted: float
    step: JobStep
    fitted: bool

    @property
    def error(self) -> float:
        """Predicted by published throughput, less one."""
        published = self.row["published"]
        ratio = published / self.predicted if self.row["quantity"] == "s/step" else self.predicted / published
        return float(ratio - 1)


def load() -> dict[str, Any]:
    """Return the sources and the rows."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def job_of(row: dict[str, Any]) -> Job:
    """Return the job of a row."""
    if "shape" in row:
        shape = row["shape"]
        model = ModelShape(
            name=row["model"],
            head_dim=shape["hidden"] // shape["heads"],
            biased=True,
            positions=row["seq"],
            **shape,
        )
    else:
        model = find_model(row["model"])
    return Job(
        model=model,
        system=_system(row),
        batch=row["batch"],
        seq=row["seq"],
        flash=row["flash"],
        sequence_parallel=row["sequence_parallel"],
    )


def _system(row: dict[str, Any]) -> System:
    system = find_system(row["system"])
    per_host = min(system.per_host, row["gpus"])
    system = system.resized(row["gpus"] // per_host, per_host)
    if "memory_gbytes" in row:
        system = replace(system, device=replace(system.device, memory_gbytes=row["memory_gbytes"]))
    return system


def layouts_of(row: dict[str, Any], job: Job) -> list[Layout]:
    """Return the layout of a row, or those that it may have had."""
    base = Layout(**row["layout"])
    if not row.get("search"):
        return [base]
    batches = (base.micro_batch,) if "micro_batch" in row["layout"] else MICRO_BATCHES
    variants = [
        replace(base, micro_batch=micro, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
        for micro in batches
        for chunks in (CHUNKS if base.pp > 1 else (1,))
    ]
    return [layout for layout in variants if layout.problem(job) is None]


def quantity(row: dict[str, Any], step: JobStep) -> float:
    """Return the prediction in the row's unit."""
    job = step.job
    if row["quantity"] == "s/step":
        return step.seconds
    if row["quantity"] == "tokens/s/GPU":
        return step.tokens_per_second / row["gpus"]
    if row["quantity"] == "hardware TFLOP/s/GPU":
        # Equation 3 of Narayanan et al. 2021, with a second forward.
        m = job.model
        ends = 1 + job.seq / (6 * m.hidden) + m.vocab / (16 * m.layers * m.hidden)
        return 96 * job.tokens * m.layers * m.hidden**2 * ends / step.seconds / row["gpus"] / 1e12
    return step.tflops


def compare() -> list[Compared]:
    """Predict every row."""
    networks: dict[System, Network] = {}
    compared = []
    of_foundry = 0
    for row in load()["rows"]:
        job = job_of(row)
        network = networks.setdefault(job.system, Network(job.system, job.dtype))
        steps = [job_step(job, layout, network) for layout in layouts_of(row, job)]
        step = min(steps, key=lambda step: step.seconds)
        fitted = row["source"] == "llm-foundry" and of_foundry % 2 == 0
        of_foundry += row["source"] == "llm-foundry"
        compared.append(Compared(row=row, predicted=quantity(row, step), step=step, fitted=fitted))
    return compared


def fit(compared: Sequence[Compared]) -> dict[str, float]:
    """Return constants with the least mean error over the rows that are for fitting, by coordinate descent."""
    used = [item for item in compared if item.fitted]
    # What does not depend on the constants: exposed communication and the optimizer.
    others = [item.step.seconds - item.step.compute for item in used]
    tables: list[tuple[dict[str, float] | None, str]] = [
        (compute.MATMUL_REACH, "ampere"),
        (compute.MATMUL_REACH, "hopper"),
        (compute.ATTENTION_REACH, "ampere"),
        (compute.ATTENTION_REACH, "hopper"),
        (None, "PASSES"),
        (None, "HALF_TOKENS"),
    ]

    def read(at: int) -> float:
        table, name = tables[at]
        return float(getattr(compute, name) if table is None else table[name])

    def write(at: int, value: float) -> None:
        table, name = tables[at]
        if table is None:
            setattr(compute, name, value)
        else:
            table[name] = min(value, 0.9)

    def loss() -> float:
        errors = []
        for item, rest in zip(used, others):
            job, layout = item.step.job, item.step.layout
            seconds = layout.micro_batches(job) * compute.micro_batch_seconds(job, layout).total + rest
            errors.append(abs(math.log((1 + item.error) * item.step.seconds / seconds)))
        return statistics.fmean(errors)

    best, before = loss(), math.inf
    while before - best > 1e-4:
        before = best
        for at in range(len(tables)):
            for factor in FACTORS:
                value = read(at)
                write(at, value * factor)
                now = loss()
                if now < best:
                    best = now
                else:
                    write(at, value)
    return {f"{name} {'attention' if table is compute.ATTENTION_REACH else ''}".strip(): read(at)
            for at, (table, name) in enumerate(tables)}  # fmt: skip


def summary(compared: Sequence[Compared]) -> dict[str, Any]:
    """Return the result that is kept: the errors by source, and the rows."""

    def errors(items: Sequence[Compared]) -> dict[str, Any]:
        values = [item.error for item in items]
        return {
            "rows": len(values),
            "median_error": round(statistics.median(map(abs, values)), 4),
            "median_bias": round(statistics.median(values), 4),
            "worst": round(max(values, key=abs), 4),
        }

    groups: dict[str, list[Compared]] = {}
    for item in compared:
        name = f"{item.row['source']} {item.row['system']}" + (" (fitted)" if item.fitted else "")
        groups.setdefault(name, []).append(item)
    held_out = [item for item in compared if not item.fitted]
    return {
        "target": MOST_ERROR,
        "fitted": errors([item for item in compared if item.fitted]),
        "held_out": errors(held_out),
        "by_source": {name: errors(items) for name, items in groups.items()},
        "sources": load()["sources"],
        "rows": [
            {
                "source": item.row["source"],
                "model": item.row["model"],
                "system": item.row["system"],
                "gpus": item.row["gpus"],
                "seq": item.row["seq"],
                "layout": str(item.step.layout),
                "quantity": item.row["quantity"],
                "published": item.row["published"],
                "predicted": float(f"{item.predicted:.4g}"),
                "error": round(item.error, 4),
                "fitted": item.fitted,
            }
            for item in compared
        ],
    }


def page(result: dict[str, Any]) -> str:
    """Return the tables of docs/guides/planning.md."""
    rows = []
    for name, errors in result["by_source"].items():
        source, _, rest = name.partition(" ")
        rows.append(
            [
                f"{NAMES[source]}, {rest.split()[0].upper()}" + (", used to fit" if "fitted" in rest else ""),
                str(errors["rows"]),
                f"{errors['median_error']:.0%}",
                f"{errors['median_bias']:+.0%}",
                f"{errors['worst']:+.0%}",
            ]
        )
    held = result["held_out"]
    rows.append(
        ["**all that were not used to fit**", str(held["rows"]), f"**{held['median_error']:.0%}**",
         f"{held['median_bias']:+.0%}", f"{held['worst']:+.0%}"]
    )  # fmt: skip
    lines = [pages.markdown(("runs", "rows", "median error", "bias", "worst"), rows, aligned=True), ""]
    shown = [row for row in result["rows"] if row["source"] != "llm-foundry"]
    lines.append(
        pages.markdown(
            ("run", "GPUs", "layout", "unit", "published", "predicted", "error"),
            [
                [
                    f"{row['model']} ({row['source']})",
                    f"{row['gpus']:,}",
                    row["layout"],
                    row["quantity"],
                    f"{row['published']:g}",
                    f"{row['predicted']:.4g}",
                    f"{row['error']:+.0%}",
                ]
                for row in shown
            ],
        )
    )
    lines += ["", "Sources:", "", *(f"- `{name}`: {text}." for name, text in result["sources"].items())]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants again, and use them")
    parser.add_argument("--json", metavar="FILE", help="where the result goes (default bench/results)")
    arguments = parser.parse_args(argv)
    compared = compare()
    if arguments.fit:
        for name, value in fit(compared).items():
            print(f"{name}: {value:.3g}")
        compared = compare()
    result = summary(compared)
    output.table(
        "throughput of whole jobs: predicted beside published",
        ("runs", "rows", "median error", "bias", "worst"),
        [
            [
                name,
                str(e["rows"]),
                f"{e['median_error']:.1%}",
                f"{e['median_bias']:+.1%}",
                f"{e['worst']:+.0%}",
            ]
            for name, e in (
                *result["by_source"].items(),
                ("held out", result["held_out"]),
                ("fitted", result["fitted"]),
            )
        ],
    )
    if not arguments.fit:
        output.write("published_runs", result, arguments.json, timed=False)
    return int(result["held_out"]["median_error"] > MOST_ERROR)


if __name__ == "__main__":
    sys.exit(main())
