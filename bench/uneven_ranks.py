"""Train by DDP with one rank at half the speed: batches in equal parts beside batches sized by speed.

python -m bench.uneven_ranks [--steps 90] [--seeds 3] [--sample-ms 20] [--slow 2] [--codec none] [--json FILE]

Two ranks train the demo's GPT. A sample takes a rank ``--sample-ms`` of emulated computation beside the real one, as
where the host waits for an accelerator, and rank 1 ``--slow`` times that. Both runs start from the same weights, draw
the same samples and take turns. Throughput is the batch over the median time of a step, over the second half of the
steps, in which the sizes have settled. A row shows one seed: samples/s of both runs and their ratio, the sizes of the
parts, the held-out losses, and the stragglers that were named. The last row shows the median ratio, its range and a
verdict.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.common import machine, output
from dtcomm import ddp
from dtcomm.cli.demo import train as demo
from dtcomm.launch.ranks import run_ranks

BATCH = 30
TURN = 10
EVERY = 12
RATE = 4e-3
SHAPE = demo.ModelShape(vocabulary=demo.VOCABULARY, context=48, layers=2, width=48, heads=4)
GOAL = 1.4  # times the throughput of equal parts


@dataclass
class Run:
    """One of the two runs on this rank."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    state: ddp.State
    sampler: ddp.BalancedSampler
    loader: Any
    seconds: list[float] = field(default_factory=list)


def start(seed: int, steps: int, codec: str, balanced: bool) -> Run:
    """Return a run whose sampler looks at the speeds every `EVERY` steps, or never."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(demo.GPT(SHAPE))
    sampler = ddp.BalancedSampler(
        range(BATCH * steps), BATCH, seed=seed, every=EVERY if balanced else steps + 1
    )
    state = ddp.compress(model, codec)
    state.balance(sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    return Run(model, optimizer, state, sampler, iter(sampler))


def step(run: Run, corpus: demo.Corpus, sample_s: float) -> None:
    """Make one step on this rank's part of the next batch."""
    begin = time.perf_counter()
    windows = [
        demo.training_batch(corpus, seed=0, step=number, rank=0, size=1, length=SHAPE.context)
        for number in next(run.loader)
    ]
    inputs, targets = (torch.cat(parts) for parts in zip(*windows, strict=True))
    run.optimizer.zero_grad()
    loss = demo.cross_entropy(run.model, inputs, targets)
    time.sleep(sample_s * len(windows))
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.seconds.append(time.perf_counter() - begin)


@torch.no_grad()
def held_out(run: Run, corpus: demo.Corpus) -> float:
    """Return the held-out loss in nats per character."""
    batches = demo.held_out_batches(corpus, windows=128, size=64, length=SHAPE.context, rank=0, ranks=1)
    return statistics.fmean(float(demo.cross_entropy(run.model.module, *batch)) for batch in batches)


def train(
    rank: int, world_size: int, seed: int, steps: int, sample_s: float, slow: float, codec: str
) -> dict[str, Any]:
    """Train both runs in turns; return their throughput and loss, and what the sampler says."""
    torch.set_num_threads(1)
    corpus = demo.load_corpus(limit=2_000_000)
    runs = {name: start(seed, steps, codec, name == "by speed") for name in ("equal parts", "by speed")}
    for first in range(0, steps, TURN):
        for run in runs.values():
            dist.barrier()
            for _ in range(min(TURN, steps - first)):
                step(run, corpus, sample_s * (slow if rank == 1 else 1.0))
    balanced = runs["by speed"].sampler
    return {
        "seed": seed,
        "samples_per_s": {
            name: round(BATCH / statistics.median(run.seconds[steps // 2 :]), 2) for name, run in runs.items()
        },
        "loss": {name: round(held_out(run, corpus), 4) for name, run in runs.items()},
        "sizes": balanced.sizes,
        "stragglers": [str(straggler) for straggler in balanced.stragglers],
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sample-ms", type=float, default=20.0)
    parser.add_argument(
        "--slow", type=float, default=2.0, help="how many times as long a sample takes rank 1"
    )
    parser.add_argument("--codec", default="none")
    parser.add_argument("--json", type=Path, help="where to write instead of bench/results/uneven_ranks.json")
    options = parser.parse_args(arguments)
    results = [
        run_ranks(
            train,
            2,
            seed,
            options.steps,
            options.sample_ms * 1e-3,
            options.slow,
            options.codec,
            timeout=900,
        )[0]
        for seed in range(options.seeds)
    ]
    gains = [entry["samples_per_s"]["by speed"] / entry["samples_per_s"]["equal parts"] for entry in results]
    rows = [
        [
            f"seed {entry['seed']}",
            f"{entry['samples_per_s']['equal parts']:.1f}",
            f"{entry['samples_per_s']['by speed']:.1f}",
            f"{gain:.2f}",
            " + ".join(map(str, entry["sizes"])),
            f"{entry['loss']['equal parts']:.4f}",
            f"{entry['loss']['by speed']:.4f}",
            "; ".join(entry["stragglers"]),
        ]
        for entry, gain in zip(results, gains, strict=True)
    ]
    verdict = "PASS" if statistics.median(gains) >= GOAL else "MISS"
    spread = f"{statistics.median(gains):.2f} ({min(gains):.2f}-{max(gains):.2f})"
    rows.append(["median", "", "", spread, "", "", "", f"{verdict}: goal {GOAL:g}"])
    output.table(
        f"samples/s of two ranks, rank 1 at 1/{options.slow:g} of the speed, batch {BATCH}, {options.steps} steps",
        ["", "equal parts", "by speed", "gain", "sizes", "loss, equal", "loss, by speed", "found"],
        rows,
    )
    result = {
        "machine": machine.describe(),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "gain": round(statistics.median(gains), 3),
        "gains": [round(gain, 3) for gain in gains],
        "verdict": verdict,
        "runs": results,
    }
    output.write("uneven_ranks", result, options.json)
    return result


if __name__ == "__main__":
    main()
