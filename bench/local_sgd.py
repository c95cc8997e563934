"""Train a GPT by data parallelism, DiLoCo and Streaming DiLoCo at equal tokens: held-out loss and bytes.

python -m bench.local_sgd [--steps 1200] [--every 30] [--warm-up 0.25] [--seeds 3] [--trials 4] [--methods NAMES]
                          [--seconds S] [--fresh] [--quick] [--json FILE]

Four workers run in a loop in one process, with the arithmetic of DDP and of `dtcomm.local_sgd.LocalSGD`
(`dtcomm.measure.simulated_ranks`, `dtcomm.measure.simulated_local_sgd`; tests compare them bit by bit). The text is the
demo's. Every method sees the same batches in the same order, and ends with the same number of tokens. As in the paper
of DiLoCo, whose models were trained by data parallelism for 24,000 of 88,000 steps first, the first ``--warm-up`` of
the steps are data parallel, uncompressed; "from scratch" has none.

Learning rates are chosen on a seed that no result uses, by as many runs for each family of methods (``--trials``): of
inner rates for data parallelism, of an inner rate with an outer rate and momentum for DiLoCo and for Streaming DiLoCo.
The compressed versions of a family take the rates of the family.

"bytes a step" are what one worker sends on average after the warm-up, "peak" is the bandwidth that a worker needs so
that no step waits, in bytes for each step: the largest message over the steps that it may take (1 without delay). Both
are payloads times 2 (n - 1) / n, as an all-reduce over a ring or in two shots sends them.
Runs that the result file has are not repeated; ``--seconds`` stops after a time and continues at the next call.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.common import machine, output, pages
from bench.common.native import BUILD
from dtcomm.cli.demo import train as demo
from dtcomm.local_sgd.fragments import make_fragments
from dtcomm.measure.simulated_local_sgd import SimulatedLocalSGD
from dtcomm.measure.simulated_ranks import SimulatedRanks

WORKERS = 4
BATCH = 16
SHAPE = demo.ModelShape(vocabulary=demo.VOCABULARY, context=48, layers=3, width=48, heads=4)
SEEDS, TRIALS = 3, 4
TUNING_SEED = 1000
GOAL = 0.01  # how far above data parallelism the held-out loss may be


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train.

    Attributes:
        name: Its name in tables.
        family: Methods of a family share their learning rates.
        spec: What is compressed with what.
        fragments: The number of fragments; 0: gradients are averaged in every step.
        delay: The steps from the start of an average until it is applied.
        mixing: The weight of the common weights then.
        from_scratch: Without a warm-up.
    """

    name: str
    family: str
    spec: str
    fragments: int = 0
    delay: int = 0
    mixing: float = 1.0
    from_scratch: bool = False


STREAMING: dict[str, Any] = {"family": "streaming", "fragments": 3, "delay": 2, "mixing": 0.5}
METHODS = (
    Method(name="data parallel", family="dp", spec="none"),
    Method(name="data parallel, int8", family="dp", spec="int8"),
    Method(name="DiLoCo", family="diloco", spec="none", fragments=1),
    Method(name="DiLoCo from scratch", family="diloco", spec="none", fragments=1, from_scratch=True),
    Method(name="streaming, int4", spec="int4", **STREAMING),
    Method(name="streaming, mxfp4", spec="mxfp4", **STREAMING),
    Method(name="streaming, int2", spec="int2", **STREAMING),
)
#: The method with which the rates of a family are chosen: its first.
TUNED = {method.family: method for method in reversed(METHODS)}


@dataclass(frozen=True)
class Rates:
    """The inner and the outer learning rate, and the outer momentum; the outer rate is 0 where there is none."""

    inner: float
    outer: float = 0.0
    momentum: float = 0.0

    def __str__(self) -> str:
        outer = f", outer {self.outer:g}, momentum {self.momentum:g}" if self.outer else ""
        return f"inner {self.inner:g}{outer}"


#: What is tried, the likeliest first; as many for each family.
INNER = (Rates(8e-3), Rates(1.6e-2), Rates(4e-3), Rates(3.2e-2))
PAIRS = (Rates(8e-3, 0.7, 0.9), Rates(8e-3, 0.8, 0.6), Rates(8e-3, 0.4, 0.9), Rates(1.6e-2, 0.4, 0.9))
GRIDS = {"dp": INNER, "diloco": PAIRS, "streaming": PAIRS}


@functools.cache
def corpus() -> demo.Corpus:
    """Return the text."""
    return demo.load_corpus(limit=2_000_000)


def rate_at(rate: float, step: int, steps: int) -> float:
    """Return the learning rate of a step: a short warm-up, then a linear decrease to a tenth."""
    warm = max(1, steps // 20)
    return rate * ((step + 1) / warm if step < warm else 1 - 0.9 * (step - warm) / (steps - warm))


def backward(model: nn.Module, seed: int, step: int, worker: int) -> float:
    """Compute the gradients of a worker's batch; return the loss."""
    batch = demo.training_batch(corpus(), seed=seed, step=step, rank=worker, size=BATCH, length=SHAPE.context)
    model.zero_grad()
    loss = demo.cross_entropy(model, *batch)
    torch.autograd.backward(loss)
    return loss.item()


def update(optimizer: torch.optim.Optimizer, model: nn.Module, rate: float) -> None:
    """Clip the gradients and make a step."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the inner optimizer."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05, fused=True)


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """Return the held-out loss in nats per character."""
    batches = demo.held_out_batches(corpus(), windows=256, size=64, length=SHAPE.context, rank=0, ranks=1)
    return statistics.fmean(float(demo.cross_entropy(model, *batch)) for batch in batches)


def data_parallel(
    spec: str, inner: float, seed: int, until: int, steps: int
) -> tuple[nn.Module, torch.optim.Optimizer, list[int]]:
    """Train with averaged gradients up to step ``until``; return the model, the optimizer and one worker's payload
    bytes of each step."""
    torch.manual_seed(seed)
    model = demo.GPT(SHAPE)
    optimizer = adam(model)
    run = SimulatedRanks(spec, WORKERS, list(model.named_parameters()), seed=seed)
    sent = []
    for step in range(until):
        gradients = []
        for worker in range(WORKERS):
            backward(model, seed, step, worker)
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        before = run.all_reduce.payload_bytes
        for parameter, mean in zip(model.parameters(), run.average(gradients), strict=True):
            parameter.grad = mean
        sent.append(run.all_reduce.payload_bytes - before)
        update(optimizer, model, rate_at(inner, step, steps))
    return model, optimizer, sent


def local(
    method: Method, rates: Rates, seed: int, steps: int, every: int, warm_up: int
) -> tuple[nn.Module, list[int]]:
    """Train with averaged weights after ``warm_up`` steps of data parallelism; return the model and one worker's
    payload bytes of each step after them."""
    model, optimizer, _ = data_parallel("none", rates.inner, seed, warm_up, steps)
    replicas = [copy.deepcopy(model) for _ in range(WORKERS)]
    optimizers = [adam(replica) for replica in replicas]
    for other in optimizers:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    fragments = make_fragments(replicas[0], sizes, [], method.fragments, "strided", every)
    averages = SimulatedLocalSGD(
        replicas,
        every,
        method.spec,
        fragments=[fragment.weights for fragment in fragments],
        outer=lambda weights: torch.optim.SGD(
            weights, lr=rates.outer, momentum=rates.momentum, nesterov=rates.momentum > 0
        ),
        delay=method.delay,
        mixing=method.mixing,
    )
    for step in range(warm_up, steps):
        for worker, (replica, other) in enumerate(zip(replicas, optimizers, strict=True)):
            backward(replica, seed, step, worker)
            update(other, replica, rate_at(rates.inner, step, steps))
        averages.step()
    sent = list(averages.sent)
    averages.sync()
    return replicas[0], sent


def run(method: Method, rates: Rates, seed: int, steps: int, every: int, warm_up: int) -> dict[str, Any]:
    """Train once; return the held-out loss and the bytes."""
    begin = time.process_time()
    if method.fragments:
        model, payloads = local(method, rates, seed, steps, every, 0 if method.from_scratch else warm_up)
    else:
        model, _, payloads = data_parallel(method.spec, rates.inner, seed, steps, steps)
    share = 2 * (WORKERS - 1) / WORKERS
    return {
        "loss": round(held_out(model), 4),
        "bytes_per_step": round(share * sum(payloads) / len(payloads)),
        "peak_bytes_per_step": round(share * max(payloads) / max(1, method.delay)),
        "seconds": round(time.process_time() - begin, 1),
    }


def choose(runs: dict[str, Any], family: str, trials: int) -> Rates:
    """Return the rates with the lowest held-out loss on the tuning seed."""
    tried = GRIDS[family][:trials]
    return min(tried, key=lambda rates: runs[key(TUNED[family], rates, TUNING_SEED)]["loss"])


def key(method: Method, rates: Rates, seed: int) -> str:
    """Return the key of a run."""
    return f"{method.name} | {rates} | seed {seed}"


def table(runs: dict[str, Any], methods: list[Method], seeds: int, trials: int) -> list[list[str]]:
    """Return a row for each method that has run on all seeds, data parallelism first."""
    rows = []
    base: list[float] = []
    for method in methods:
        rates = choose(runs, method.family, trials)
        found = [runs[name] for seed in range(seeds) if (name := key(method, rates, seed)) in runs]
        if len(found) < seeds:
            continue
        losses = [entry["loss"] for entry in found]
        base = base or losses
        gaps = [100 * (loss / reference - 1) for loss, reference in zip(losses, base, strict=True)]
        rows.append(
            [
                method.name,
                str(rates),
                f"{statistics.fmean(losses):.4f}",
                f"{statistics.fmean(gaps):+.2f} % ({min(gaps):+.2f} to {max(gaps):+.2f})",
                f"{found[0]['bytes_per_step']:,}",
                f"{found[0]['peak_bytes_per_step']:,}",
                "" if method is METHODS[0] else "PASS" if statistics.fmean(gaps) <= 100 * GOAL else "MISS",
            ]
        )
    return rows


COLUMNS = ["method", "rates", "held-out loss", "beside data parallel", "bytes a step", "peak", "goal"]


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/sites.md."""
    return pages.markdown(COLUMNS, table(result["runs"], list(METHODS), SEEDS, TRIALS), aligned=True)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument(
        "--warm-up", type=float, default=0.25, help="share of the steps that are data parallel first"
    )
    parser.add_argument("--every", type=int, default=30, help="steps between two averages of a fragment")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--trials", type=int, default=TRIALS, choices=range(1, TRIALS + 1), help="rates tried for each family"
    )
    names = [method.name for method in METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, help="beside data parallel")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that were made before")
    parser.add_argument("--quick", action="store_true", help="60 steps, one seed; writes under build/bench")
    parser.add_argument("--json", type=Path, help="where to write instead of bench/results/local_sgd.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.every, options.seeds, options.trials = 60, 10, 1, 1
    path = options.json or (BUILD if options.quick else output.RESULTS.parent) / "results" / "local_sgd.json"
    torch.set_num_threads(1)
    runs: dict[str, Any] = {}
    saved = {} if options.fresh else output.resumable(path)
    setting = {"steps": options.steps, "every": options.every, "warm_up": options.warm_up}
    if {name: saved.get(name) for name in setting} == setting:
        runs = saved["runs"]
    end = time.monotonic() + options.seconds
    methods = [method for method in METHODS if method is METHODS[0] or method.name in options.methods]
    families = list(dict.fromkeys(method.family for method in methods))
    tuning = [
        (TUNED[family], rates, TUNING_SEED)
        for family in families
        for rates in GRIDS[family][: options.trials]
    ]
    result = make_runs(runs, tuning, options, path, end)
    if all(key(*entry) in runs for entry in tuning):
        final = [
            (method, choose(runs, method.family, options.trials), seed)
            for seed in range(options.seeds)
            for method in methods
        ]
        result = make_runs(runs, final, options, path, end)
        output.table(
            f"{WORKERS} workers, {options.steps} steps of {BATCH} x {SHAPE.context} characters each, averages every "
            f"{options.every} steps; goal: at most {100 * GOAL:g} % above data parallel",
            COLUMNS,
            table(runs, methods, options.seeds, options.trials),
        )
    if time.monotonic() > end:
        print("stopped in time; call again to go on")
    return result


def make_runs(
    runs: dict[str, Any],
    wanted: list[tuple[Method, Rates, int]],
    options: argparse.Namespace,
    path: Path,
    end: float,
) -> dict[str, Any]:
    """Make the runs that are missing until ``end``, and write the file after each."""
    for method, rates, seed in wanted:
        name = key(method, rates, seed)
        if name not in runs and time.monotonic() < end:
            warm_up = round(options.warm_up * options.steps)
            runs[name] = run(method, rates, seed, options.steps, options.every, warm_up)
            print(f"{name}: {runs[name]['loss']} in {runs[name]['seconds']} s", flush=True)
            write(runs, options, path)
    return write(runs, options, path)


def write(runs: dict[str, Any], options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Write the result file."""
    result = {
        "machine": machine.describe(),
        "workers": WORKERS,
        "steps": options.steps,
        "every": options.every,
        "warm_up": options.warm_up,
        "parameters": sum(parameter.numel() for parameter in demo.GPT(SHAPE).parameters()),
        "core_seconds": round(sum(entry["seconds"] for entry in runs.values())),
        "runs": runs,
    }
    output.write("local_sgd", result, path, timed=False)
    return result


if __name__ == "__main__":
    main()
