"""Compare training under FSDP with every spec to uncompressed training: a small GPT on Python's source, three seeds.

python -m bench.fsdp_convergence [--task gpt] [--methods defaults qwZ …] [--seeds N] [--steps N] [--fresh] [--quick]
    [--json FILE]

Four ranks run in a loop in one process on the native engine (bench/training/shards.py says why that is exact). Runs
that the result file has are not repeated; `--fresh` repeats them. A full run draws a
picture of docs/results, and `python -m bench.pages` writes the table of docs/results/fsdp.md. ``--task text`` trains
the GPT of 6.5 M parameters of bench.workloads instead, by default with one seed; a method then takes about five minutes
of one core.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common import machine, output
from bench.common.native import BUILD
from bench.common.pages import DOCS
from bench.training import shards_page
from bench.training.runs import CURVE
from bench.training.shards import METHODS, Method, Shards
from bench.training.tasks import RANKS, TASKS, Task
from bench.training.text import TEXT
from dtcomm.cli.demo.train import GPT

#: The steps and the seeds of a task.
DEFAULTS = {"gpt": (600, 3), "text": (400, 1)}


def task_of(name: str, steps: int) -> Task:
    """Return one of the tasks of `DEFAULTS` with another number of steps."""
    if name == "text":
        return TEXT.shortened(steps).task("adamw", TEXT.rates["adamw"], RANKS)
    return replace(TASKS[name], steps=steps)


def train(task: Task, method: Method, seed: int) -> dict[str, Any]:
    """Train once; return the metric, the loss curve, the bytes relative to uncompressed, and the CPU seconds."""
    begin = time.process_time()
    torch.manual_seed(seed)
    model = task.model()
    assert isinstance(model, GPT)
    blocks = [f"blocks.{number}" for number in range(len(model.blocks))]
    shards = Shards(model, blocks, method, RANKS)
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = task.optimizer(list(exact.values()))
    curve: list[float] = []
    for step in range(task.steps):
        gathered = shards.gather(exact)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(gathered[name])
        gradients, total = [], 0.0
        for rank in range(RANKS):
            loss = task.loss(model, task.batch(seed, step, rank))
            rank_gradients = torch.autograd.grad(loss, list(model.parameters()))
            gradients.append(dict(zip(exact, rank_gradients, strict=True)))
            total += float(loss.detach()) / RANKS
        for name, mean in shards.scatter(gradients).items():
            exact[name].grad = mean
        for group in optimizer.param_groups:
            group["lr"] = task.rate_at(step)
        torch.nn.utils.clip_grad_norm_(list(exact.values()), 1.0)
        optimizer.step()
        curve.append(total)
    with torch.no_grad():
        # FSDP's forward pass computes with the gathered parameters, not with the optimizer's exact ones.
        for name, value in shards.gather(exact).items():
            model.get_parameter(name).copy_(value)
    width = max(1, len(curve) // CURVE)
    windows = [curve[start : start + width] for start in range(0, len(curve), width)]
    return {
        "metric": round(task.evaluate(model), 5),
        "curve": [round(sum(window) / len(window), 4) for window in windows],
        "sent": round(shards.wire_bytes / shards.plain_bytes, 5),
        "seconds": round(time.process_time() - begin, 2),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the methods, print the table and write the files; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(DEFAULTS), default="gpt")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    steps_of, seeds_of = (", ".join(f"{task} {row[i]}" for task, row in DEFAULTS.items()) for i in (0, 1))
    parser.add_argument("--seeds", type=int, help=f"default: {seeds_of}")
    parser.add_argument("--steps", type=int, help=f"default: {steps_of}")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that were made before")
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps; writes under build/bench")
    parser.add_argument("--json", type=Path, help="where to write instead of bench/results")
    options = parser.parse_args(arguments)
    steps, seeds = DEFAULTS[options.task]
    steps, seeds = options.steps or steps, options.seeds or seeds
    if options.quick:
        steps, seeds = 20, 1
    name = shards_page.RESULTS[options.task]
    default = (BUILD if options.quick else output.RESULTS.parent) / "results" / f"{name}.json"
    path = options.json or default
    torch.set_num_threads(1)
    task = task_of(options.task, steps)
    runs: dict[str, Any] = {}
    saved = {} if options.fresh else output.resumable(path)
    if saved.get("steps") == steps:
        runs = saved["runs"]
    for seed in range(seeds):
        for method in options.methods:
            key = shards_page.key(method, seed)
            if key not in runs:
                runs[key] = train(task, METHODS[method], seed)
                print(f"{key}: {runs[key]['metric']} in {runs[key]['seconds']} s", flush=True)
                _write(runs, name, steps, path)
    result = _write(runs, name, steps, path)
    output.table(*shards_page.table(runs))
    print("\n".join(shards_page.verdicts(runs)))
    if path == output.RESULTS / f"{name}.json":
        picture = DOCS / f"results/{name}.png"
        shards_page.plot(runs, picture)
        print(f"{picture}; python -m bench.pages writes the table")
    return result


def _write(runs: dict[str, Any], name: str, steps: int, path: Path) -> dict[str, Any]:
    result = {
        "machine": machine.describe(),
        "ranks": RANKS,
        "steps": steps,
        "core_seconds": round(sum(run["seconds"] for run in runs.values())),
        "verdicts": shards_page.verdicts(runs),
        "runs": runs,
    }
    output.write(name, result, path, timed=False)
    return result


if __name__ == "__main__":
    main()
