"""Measure the effect of every compression method, with and without error feedback, on training.

python -m bench.convergence [--tasks mlp cnn gpt] [--methods int8 …] [--seeds 3] [--seconds S] [--fresh] [--quick]

The tasks are digits (scikit-learn's) with an MLP and a small CNN, and Python's source with a small GPT. Four ranks
run in a loop in one process (bench/training/runs.py says why that is exact), then the MLP runs as DDP. Runs that the
result file has are not repeated; ``--fresh`` repeats them, ``--seconds`` stops after a time and continues at the next
call. The plot goes to docs/results/convergence.png, and `python -m bench.pages` writes the table.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import machine, output
from bench.common.native import BUILD
from bench.training import page
from bench.training.runs import METHODS, Method, as_ddp, in_a_loop
from bench.training.tasks import RANKS, TASKS, Task, Unavailable
from dtcomm.launch.ranks import run_ranks

DDP_TASK = "mlp"


def planned_runs(
    tasks: list[str], methods: list[str], seeds: int
) -> list[tuple[str, Task, Method, bool, int]]:
    """Return (key, task, method, feedback, seed) of every run in a loop, seed by seed.

    With this order, partial results can be compared.
    """
    runs = []
    for seed in range(seeds):
        for task in map(TASKS.__getitem__, tasks):
            for method in map(METHODS.__getitem__, methods):
                if method.sgd and task.adam:
                    continue  # a momentum before compression and Adam's after it would be two
                for feedback in (True, False):
                    if feedback or not method.alone:
                        runs.append(
                            (page.key(task.name, method.name, feedback, seed), task, method, feedback, seed)
                        )
    return runs


def load(path: Path) -> dict[str, Any]:
    """Return the runs of earlier calls on this commit and processor."""
    runs: dict[str, Any] = output.resumable(path).get("runs", {})
    return runs


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write the files; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that were made before")
    parser.add_argument("--quick", action="store_true", help="perceptron, one seed; writes under build/bench")
    parser.add_argument("--json", type=Path, help="where to write instead of bench/results/convergence.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tasks, options.seeds = ["mlp"], 1
    default = (BUILD if options.quick else output.RESULTS.parent) / "results" / "convergence.json"
    path = options.json or default
    torch.set_num_threads(1)
    runs = {} if options.fresh else load(path)
    end = time.monotonic() + options.seconds
    plan = planned_runs(options.tasks, options.methods, options.seeds)
    complete = True
    for number, (key, task, method, feedback, seed) in enumerate(plan, 1):
        if key in runs:
            continue
        if time.monotonic() > end:
            complete = False
            break
        try:
            runs[key] = in_a_loop(task, method, feedback, seed)
        except Unavailable as error:
            parser.error(str(error))
        print(f"{number}/{len(plan)} {key}: {runs[key]['metric']} in {runs[key]['seconds']} s", flush=True)
        _write(runs, path)
    for method in map(METHODS.__getitem__, options.methods):
        key = page.ddp_key(DDP_TASK, method.name)
        if DDP_TASK not in options.tasks or key in runs:
            continue
        if time.monotonic() > end:
            complete = False
            break
        runs[key] = _as_ddp(TASKS[DDP_TASK], method)
        print(f"{key}: {runs[key]['metric']}, guard {runs[key]['guard'] or 'silent'}", flush=True)
        _write(runs, path)
    result = _write(runs, path)
    if not complete:
        print("stopped in time; call again to go on")
    for title, columns, rows in page.tables(runs):
        output.table(title, columns, rows)
    print("\n".join(page.verdicts(runs)))
    if complete and path == output.RESULTS / "convergence.json":
        print(f"{page.plot(runs)}; python -m bench.pages writes the table")
    return result


def _as_ddp(task: Task, method: Method) -> dict[str, Any]:
    results = run_ranks(as_ddp, RANKS, task.name, method.name, 0, timeout=300)
    metrics = {result["metric"] for result in results}
    if len(metrics) > 1:
        raise AssertionError(f"{method.name}: ranks ended with different weights, metrics {sorted(metrics)}")
    curve = [
        round(sum(losses) / RANKS, 4) for losses in zip(*(result["curve"] for result in results), strict=True)
    ]
    return {**results[0], "curve": curve, "seconds": round(sum(result["seconds"] for result in results), 2)}


def _without_curve(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run with its final training loss in place of the curve."""
    curve = run.get("curve")
    kept = {name: value for name, value in run.items() if name != "curve"}
    return kept if curve is None else {**kept, "final_training_loss": curve[-1]}


def _write(runs: dict[str, Any], path: Path) -> dict[str, Any]:
    result = {
        "machine": machine.describe(),
        "ranks": RANKS,
        "core_seconds": round(sum(run["seconds"] for run in runs.values())),
        "verdicts": page.verdicts(runs),
        "runs": {key: _without_curve(run) for key, run in runs.items()},
    }
    output.write("convergence", result, path, timed=False)
    return result


if __name__ == "__main__":
    main()
