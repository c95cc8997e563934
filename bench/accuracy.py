"""Train a small GPT with every integration, with and without codecs, and compare the held-out losses.

python -m bench.accuracy [--parts ddp fsdp tp local_sgd] [--steps 300] [--repeat 3] [--quick] [--json FILE]

Two ranks of one thread train the demo's GPT on Python's source code, with AdamW; a round is another seed. The losses
are in nats per character. A difference is that to the part's "none" with the same seed, so the spread of the seeds is
not in it. The exit status is 1 if a loss is not finite or if the ranks' losses differ.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtcomm.ddp
import dtcomm.fsdp
import dtcomm.tp
from bench.common import harness, report
from bench.common.ranks import rank_pool
from dtcomm.cli.demo import train as demo
from dtcomm.local_sgd import LocalSGD

SHAPE = demo.ModelShape(vocabulary=demo.VOCABULARY, context=48, layers=2, width=64, heads=4)
RANKS, SIZE, RATE = 2, 12, 4e-3
PLAN = {
    "blocks.*.qkv": "column_packed3",
    "blocks.*.projection": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}
#: Part → contestant → options of dtcomm's call; the first one is uncompressed.
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {
        "none": {"codec": "none"},
        "int8": {"codec": "int8"},
        "int4": {"codec": "int4"},
        "topk, feedback": {"codec": "topk"},
        "powersgd": {"codec": "powersgd:rank=4"},
    },
    "fsdp": {
        "none": {"gradients": "none"},
        "int8, fp8": {"gradients": "int8", "parameters": "fp8_e4m3"},
        "zero++": {"preset": "zero++"},
        "sdp4bit": {"preset": "sdp4bit"},
    },
    "tp": {spec: {"codec": spec} for spec in ("none", "int8", "int4")},
    "local_sgd": {spec: {"codec": spec} for spec in ("none", "int8", "int4")},
}


@cache
def corpus() -> demo.Corpus:
    """Return the text."""
    return demo.load_corpus(limit=2_000_000)


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate of a step: a short warm-up, then a linear decrease to a hundredth."""
    warm = max(1, steps // 20)
    return RATE * ((step + 1) / warm if step < warm else 1 - 0.99 * (step - warm) / (steps - warm))


def train(
    rank: int, ranks: int, part: str, options: dict[str, Any], steps: int, seed: int
) -> tuple[float, float]:
    """Train once; return the held-out loss and the training loss of the last tenth of the steps on this rank."""
    torch.manual_seed(seed)
    model: nn.Module = demo.GPT(SHAPE)
    after: Callable[[], object] = lambda: None  # noqa: E731
    finish = after
    if part == "ddp":
        model = DistributedDataParallel(model)
        dtcomm.ddp.compress(model, feedback=True, **options)
    elif part == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        dtcomm.fsdp.compress(model, **options)
    elif part == "tp":
        dtcomm.tp.compress(model, init_device_mesh("cpu", (ranks,)), plan=PLAN, **options)
    else:
        averages = LocalSGD(model, every=10, feedback=True, **options)
        after, finish = averages.step, averages.sync
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        batch_of = 0 if part == "tp" else rank  # ranks of tensor parallelism see the same batch
        batch = demo.training_batch(
            corpus(), seed=seed, step=step, rank=batch_of, size=SIZE, length=SHAPE.context
        )
        optimizer.zero_grad()
        loss = demo.cross_entropy(model, *batch)
        torch.autograd.backward(loss)
        optimizer.step()
        after()
        losses.append(loss.item())
    finish()
    batches = demo.held_out_batches(corpus(), windows=192, size=64, length=SHAPE.context, rank=0, ranks=1)
    with torch.no_grad():
        held_out = statistics.fmean(float(demo.cross_entropy(model, *batch)) for batch in batches)
    dist.barrier()
    return held_out, statistics.fmean(losses[-max(1, steps // 10) :])


def main(arguments: list[str] | None = None) -> int:
    """Train and print."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--steps", type=int, default=300)
    options = harness.parse(parser, arguments)
    if options.steps < 1:
        parser.error(f"--steps: must be at least 1, got {options.steps}")
    if options.quick:
        options.steps, options.repeat = min(options.steps, 10), 1
    results = harness.Results(options)
    with rank_pool(RANKS, pinned=False, timeout=1800) as pool:
        for part in options.parts:
            plain: list[float] = []
            lines = []
            for name, of_call in PARTS[part].items():
                held_out, training = [], []
                for seed in range(options.repeat):
                    case = {"part": part, "options": of_call, "steps": options.steps, "seed": seed}
                    ranks = pool.call("run", function=train, arguments=case)
                    losses = [loss for loss, _ in ranks]
                    if not all(map(math.isfinite, losses)):
                        results.failed.append(f"{part}, {name}, seed {seed}: held-out losses {losses}")
                    elif max(losses) - min(losses) > 1e-6 * max(losses):
                        results.failed.append(f"{part}, {name}, seed {seed}: ranks differ, {losses}")
                    held_out.append(losses[0])
                    training.append(statistics.fmean(loss for _, loss in ranks))
                plain = plain or held_out
                changes = [own - other for own, other in zip(held_out, plain, strict=True)]
                row = {"part": part, "name": name, "steps": options.steps, "ranks": RANKS, "against": "none"}
                row |= {
                    "held_out": [round(loss, 4) for loss in held_out],
                    "training": [round(loss, 4) for loss in training],
                    "difference": [round(change, 4) for change in changes],
                }
                results.rows.append(row)
                lines.append(
                    [
                        name,
                        f"{statistics.median(training):.4f}",
                        f"{statistics.median(held_out):.4f}",
                        f"{statistics.median(changes):+.4f} ({min(changes):+.4f} to {max(changes):+.4f})",
                    ]
                )
                results.write()
            columns = ["", "training loss", "held-out loss", "difference to none"]
            report.table(f"{part}, {options.steps} steps, {options.repeat} seeds", columns, lines)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
