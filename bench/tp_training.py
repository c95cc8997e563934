"""Train a GPT with tensor parallelism, uncompressed and with int8 activations and gradients, on TP = 2 and DP x TP =
2 x 2.

python -m bench.tp_training [--steps N] [--codec int8] [--backward-codec int8] [--only NAMES] [--json FILE]

The text is Python's source, and ranks are processes that share memory. The result is the final held-out loss in nats
per character. Small messages are compressed too. With DP x TP, two pairs of ranks take half of each batch and average
their gradients with DDP.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bench.common import machine, output
from bench.training import gpt
from dtcomm import tp
from dtcomm.cli.demo import train as demo
from dtcomm.launch.ranks import run_ranks

SHAPE = demo.ModelShape(vocabulary=demo.VOCABULARY, context=48, layers=2, width=64, heads=4)
SIZE, RATE = 12, 3e-3
#: (data-parallel, tensor-parallel) ranks, and whether activations and gradients are compressed.
RUNS = {
    "TP=2, none": (1, 2, False),
    "TP=2, compressed": (1, 2, True),
    "DP x TP = 2 x 2, none": (2, 2, False),
    "DP x TP = 2 x 2, compressed": (2, 2, True),
}
MAX_RISE = 0.01  # of the held-out loss, as a fraction


def train(
    rank: int, world_size: int, shape: tuple[int, int], codecs: tuple[str, str], steps: int
) -> dict[str, Any]:
    """Train on one rank; return the loss curve, the held-out loss and the seconds."""
    torch.set_num_threads(1)
    replicas = shape[0]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    corpus = demo.load_corpus(limit=2_000_000)
    torch.manual_seed(0)
    model = demo.GPT(SHAPE)
    tp.compress(model, mesh["tp"], codecs[0], gpt.PLAN, backward_codec=codecs[1], latency=False)
    runner: nn.Module = model
    if replicas > 1:
        runner = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    begin, curve = time.monotonic(), []
    warmup, replica = max(1, steps // 20), mesh["dp"].get_local_rank()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (
                (step + 1) / warmup if step < warmup else 1 - 0.99 * (step - warmup) / (steps - warmup)
            )
        batch = demo.training_batch(corpus, seed=0, step=step, rank=0, size=SIZE, length=SHAPE.context)
        inputs, targets = (tensor.chunk(replicas)[replica] for tensor in batch)
        loss = demo.cross_entropy(runner, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        if step % 20 == 0 or step + 1 == steps:
            if replicas > 1:
                dist.all_reduce(mean, group=mesh["dp"].get_group())
            curve.append(round(float(mean) / replicas, 4))
    batches = demo.held_out_batches(corpus, windows=192, size=64, length=SHAPE.context, rank=0, ranks=1)
    with torch.no_grad():
        held_out = sum(float(demo.cross_entropy(model, *held_out_batch)) for held_out_batch in batches) / len(
            batches
        )
    return {"held_out": round(held_out, 5), "curve": curve, "seconds": round(time.monotonic() - begin, 1)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, print the table and write the file; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--codec", default="int8", help="of activations")
    parser.add_argument("--backward-codec", default="int8", help="of their gradients")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--json", help="where to write instead of bench/results/tp_training.json")
    options = parser.parse_args(arguments)
    runs: dict[str, dict[str, Any]] = {}
    for name in options.only:
        replicas, shards, compressed = RUNS[name]
        codecs = (options.codec, options.backward_codec) if compressed else ("none", "none")
        results = run_ranks(train, replicas * shards, (replicas, shards), codecs, options.steps, timeout=600)
        if len({result["held_out"] for result in results[:shards]}) > 1:
            raise AssertionError(f"{name}: the ranks of a model disagree: {results}")
        runs[name] = {**results[0], "codec": codecs[0], "backward_codec": codecs[1]}
        print(f"{name}: {runs[name]['held_out']} in {runs[name]['seconds']} s", flush=True)
    table_rows, verdicts = [], []
    for name, run in runs.items():
        plain = runs.get(f"{name.split(', ')[0]}, none")
        change = None if plain is None or plain is run else run["held_out"] / plain["held_out"] - 1
        if change is not None:
            passed = "PASS" if change <= MAX_RISE else "MISS"
            verdicts.append(
                f"{passed} {name}: held-out loss {100 * change:+.2f} %, at most {100 * MAX_RISE:g} %"
            )
        codecs_used = f"{run['codec']} / {run['backward_codec']}"
        change_text = "" if change is None else f"{100 * change:+.2f} %"
        table_rows.append(
            [name, codecs_used, f"{run['curve'][-1]:.4f}", f"{run['held_out']:.4f}", change_text]
        )
    columns = ["run", "forward / backward", "training loss", "held-out loss", "relative to none"]
    output.table(f"a GPT of {SHAPE.layers} layers, {options.steps} steps", columns, table_rows)
    print("\n".join(verdicts))
    result = {"machine": machine.describe(), "steps": options.steps, "runs": runs, "verdicts": verdicts}
    print(output.write("tp_training", result, options.json))
    return result


if __name__ == "__main__":
    main()
