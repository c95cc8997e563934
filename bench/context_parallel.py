"""Measure context-parallel attention: the error of codecs, the time of a step between two hosts, and training.

python -m bench.context_parallel [errors] [speed] [training] [--gbit 1 10] [--tokens 256 1024] [--repetitions N]
    [--steps N] [--seeds 0 1 2] [--json FILE]

- errors: relative error (L2 norms) of output and gradients beside attention in one process, for each codec; two ranks.
- speed: forward and backward pass of causal attention, with 4096 tokens in sequences of `--tokens`, on two ranks of one
  thread each in two network namespaces connected by a link of `--gbit` Gbit/s (needs root and iproute2). The
  contestants take turns. "torch" gathers keys and values with torch.distributed over Gloo and attends with a mask;
  "no communication" does a rank's share of the work on its own keys and values. The difference to "ring none" is
  communication that is not hidden.
- training: the demo's GPT on its text, with the sequence on two ranks, uncompressed and compressed; held-out loss in
  nats per character. The spread is that of the seeds without compression.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from bench.common import machine, output
from bench.common import seeds as seeds_of
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.turns import in_turn
from dtcomm import context_parallel as cp
from dtcomm.cli.demo import train as demo
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure import netns

PARTS = ("errors", "speed", "training")
TORCH, ALONE, NONE = "torch", "no communication", "ring none"
HEADS, DIM, TOKENS = 8, 64, 4096
#: Contestant → options of `attention`.
CONTESTANTS: dict[str, dict[str, str]] = {
    NONE: {},
    "ring bf16": {"kv_codec": "bf16"},
    "ring int8": {"kv_codec": "int8"},
    "ring int8, gradients int8": {"kv_codec": "int8", "backward_codec": "int8"},
    "all_gather none": {"method": "all_gather"},
    "all_gather int8": {"method": "all_gather", "kv_codec": "int8"},
    "ulysses none": {"method": "ulysses"},
    "ulysses int8": {"method": "ulysses", "kv_codec": "int8", "qo_codec": "int8"},
}
#: Required speed-up of "ring int8" over "ring none" where communication is at least this share of the time.
FASTER, DOMINANT_SHARE = 2.0, 0.75
ERROR_CODECS = ("none", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int6", "mxfp8", "int4", "mxfp4")
SHAPE = demo.ModelShape(vocabulary=demo.VOCABULARY, context=96, layers=2, width=64, heads=4)
SIZE, RATE = 12, 3e-3
#: Run → options of `context_parallel`.
RUNS: dict[str, dict[str, str]] = {
    "none": {},
    "int8": {"kv_codec": "int8"},
    "int8, gradients int8": {"kv_codec": "int8", "backward_codec": "int8"},
    "fp8_e4m3": {"kv_codec": "fp8_e4m3"},
}


def sequences(batch: int, tokens: int) -> list[torch.Tensor]:
    """Return queries, keys, values and an upstream gradient, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, HEADS, tokens, DIM, generator=generator) for _ in range(4)]


# --- errors -----------------------------------------------------------------------------------------------------------


def errors_of_rank(rank: int, ranks: int) -> dict[str, list[float]]:
    """Return codec → relative error of the output and of the gradients of queries, keys and values."""
    torch.set_num_threads(1)
    *inputs, upstream = sequences(1, 512)
    exact = [x.clone().requires_grad_() for x in inputs]
    out = functional.scaled_dot_product_attention(*exact, is_causal=True)
    out.backward(upstream)
    expected = [out.detach(), *(x.grad for x in exact if x.grad is not None)]
    errors = {}
    for codec in ERROR_CODECS:
        parts = [cp.shard(x, 2).clone().requires_grad_() for x in inputs]
        out = cp.attention(*parts, is_causal=True, kv_codec=codec)
        out.backward(cp.shard(upstream, 2))
        actual = [cp.unshard(x, 2) for x in (out, *(x.grad for x in parts if x.grad is not None))]
        errors[codec] = [float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True)]
    return errors


def measure_errors() -> dict[str, list[float]]:
    """Measure and print the errors of all codecs."""
    errors: dict[str, list[float]] = run_ranks(errors_of_rank, 2, timeout=120)[0]
    lines = [[codec, *(f"{error:.1e}" for error in values)] for codec, values in errors.items()]
    columns = ["kv_codec", "output", "dq", "dk", "dv"]
    output.table("relative errors, causal, 2 ranks, gradients in the default codec", columns, lines)
    return errors


# --- speed ------------------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """All ranks' keys and values in fp32 over Gloo, concatenated along the sequence; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(), 3)]
        received = [torch.empty_like(part) for part in parts]
        dist.all_to_all(received, parts)
        return torch.stack(received).sum(0)


class Rank:
    """One rank in a namespace of its own."""

    def __init__(self, rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
        netns.init_process_group(rank, ranks, rendezvous, namespaces)
        self.rank = rank
        self.alone = [dist.new_group([number]) for number in range(ranks)][rank]
        self._inputs: dict[int, list[torch.Tensor]] = {}

    def measure(self, name: str, tokens: int, iters: int) -> float:
        """Return this rank's mean seconds of ``iters`` steps that follow each other without a pause."""
        step = self._step(name, tokens)
        dist.barrier()
        step()
        start = time.perf_counter()
        for _ in range(iters):
            step()
        return (time.perf_counter() - start) / iters

    def error(self, name: str, tokens: int) -> float:
        """Return the relative error of a contestant's output beside attention on this rank."""
        q, k, v, _ = sequences(TOKENS // tokens, tokens)
        layout = "contiguous" if name == TORCH else "zigzag"
        expected = cp.shard(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True), 2, layout=layout
        )
        return float((self._step(name, tokens)() - expected).norm() / expected.norm())

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _step(self, name: str, tokens: int) -> Callable[[], torch.Tensor]:
        layout = "contiguous" if name == TORCH else "zigzag"
        q, k, v, upstream = (
            cp.shard(x, 2, layout=layout).clone() for x in sequences(TOKENS // tokens, tokens)
        )
        inputs = [x.requires_grad_() for x in (q, k, v)]

        def step() -> torch.Tensor:
            if name == TORCH:
                out = self._torch(*inputs)
            elif name == ALONE:  # without a mask as many pairs as with it on two ranks
                out = cp.attention(*inputs, group=self.alone)
            else:
                options: Any = CONTESTANTS[name]
                out = cp.attention(*inputs, is_causal=True, **options)
            torch.autograd.grad(out, inputs, upstream)
            return out.detach()

        return step

    def _torch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        tokens = q.shape[2]
        keys, values = _Gather.apply(torch.stack([k, v]))  # type: ignore[no-untyped-call]
        mask = torch.ones(tokens, keys.shape[2], dtype=torch.bool).tril(self.rank * tokens)
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def measure_speed(gbits: list[float], tokens: list[int], repetitions: int) -> list[dict[str, Any]]:
    """Measure and print a row for each rate and length; the contestants take turns."""
    rows = []
    for gbit in gbits:
        with netns.two_hosts(gbit) as namespaces, TemporaryDirectory() as folder:
            rendezvous = str(Path(folder) / "rendezvous")
            with Pool(Rank, 2, timeout=300, rendezvous=rendezvous, namespaces=namespaces) as pool:
                rows += [_speed_row(pool, gbit, length, repetitions) for length in tokens]
    names = [TORCH, *CONTESTANTS, ALONE]
    lines = []
    for row in rows:
        cells = [f"{row['gbit']:g} Gbit/s, {row['tokens']} tokens", f"{100 * row['communication']:.0f} %"]
        for name in names:
            ratio = row["ratios"].get(name)
            milliseconds = f"{row['contestants'][name]['median_us'] / 1e3:.3g}"
            cells.append(milliseconds if ratio is None else f"{milliseconds}: {ratio:.2f}x")
        lines.append(cells)
    output.table("ms of a step, and times faster than ring none", ["", "communication", *names], lines)
    print("\n".join(row["verdict"] for row in rows))
    return rows


def _speed_row(pool: Any, gbit: float, tokens: int, repetitions: int) -> dict[str, Any]:
    names = [TORCH, *CONTESTANTS, ALONE]
    errors = {name: max(pool.call("error", name=name, tokens=tokens)) for name in names if name != ALONE}
    iters = {
        name: iterations(max(pool.call("measure", name=name, tokens=tokens, iters=1)), 0.2) for name in names
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        for name in in_turn(names, repetition):
            times[name].append(max(pool.call("measure", name=name, tokens=tokens, iters=iters[name])))
    timings = {name: Timing.of(series) for name, series in times.items()}
    plain = timings[NONE].median
    share = max(0.0, 1 - timings[ALONE].median / plain)
    ratios = {name: round(plain / timing.median, 3) for name, timing in timings.items() if name != NONE}
    case, ratio = f"{gbit:g} Gbit/s, {tokens} tokens", ratios["ring int8"]
    if share >= DOMINANT_SHARE:
        verdict = (
            f"{'PASS' if ratio >= FASTER else 'MISS'} {case}: ring int8 {ratio:.2f}x, at least {FASTER:g}"
        )
    else:
        verdict = (
            f"no target {case}: communication is {100 * share:.0f} % of the time, so nothing could be more than "
            f"{1 / (1 - share):.1f}x as fast; ring int8 is {ratio:.2f}x"
        )
    return {
        "gbit": gbit,
        "tokens": tokens,
        "communication": round(share, 3),
        "load": machine.load(),
        "contestants": {name: timing.as_dict() for name, timing in timings.items()},
        "ratios": ratios,
        "errors": {name: float(f"{error:.3g}") for name, error in errors.items()},
        "verdict": verdict,
    }


# --- training ---------------------------------------------------------------------------------------------------------


def train(rank: int, ranks: int, options: dict[str, Any], steps: int, seed: int) -> float:
    """Train with the sequence on all ranks; return the held-out loss of this rank's model on whole sequences."""
    torch.set_num_threads(1)
    corpus = demo.load_corpus(limit=2_000_000)
    torch.manual_seed(seed)
    model = demo.GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    warmup = max(1, steps // 20)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (
                (step + 1) / warmup if step < warmup else 1 - 0.99 * (step - warmup) / (steps - warmup)
            )
        inputs, targets = demo.training_batch(
            corpus, seed=seed, step=step, rank=0, size=SIZE, length=SHAPE.context
        )
        positions = torch.arange(SHAPE.context)
        optimizer.zero_grad()
        with cp.context_parallel(buffers=[inputs, targets, positions], buffer_seq_dims=[1, 1, 0], **options):
            x = model.symbols(inputs) + model.positions(positions)
            logits = model.head(model.norm(model.blocks(x)))
            functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        optimizer.step()
    batches = demo.held_out_batches(corpus, windows=192, size=64, length=SHAPE.context, rank=0, ranks=1)
    with torch.no_grad():
        return sum(float(demo.cross_entropy(model, *batch)) for batch in batches) / len(batches)


def measure_training(steps: int, seeds: list[int]) -> dict[str, Any]:
    """Train all runs and print their held-out losses."""
    losses: dict[str, list[float]] = {name: [] for name in RUNS}
    for seed in seeds:
        for name, options in RUNS.items():
            results = run_ranks(train, 2, options, steps, seed, timeout=600)
            if len(set(results)) > 1:
                raise AssertionError(f"{name}: the ranks' models differ: {results}")
            losses[name].append(round(results[0], 4))
            print(f"seed {seed}, {name}: {results[0]:.4f}", flush=True)
    title = f"held-out loss, {steps} steps, sequence on 2 ranks"
    return {"steps": steps, **seeds_of.compare(losses, "none", seeds=seeds, title=title, column="kv_codec")}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what was asked for, print it and write the file; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--json",
        help="where to write instead of bench/results/context_parallel.json, or …_training.json",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; valid: {', '.join(PARTS)}")
    if options.json and {"training"} < set(options.parts):
        parser.error("--json: training has a file of its own; ask for the other parts in another call")
    result: dict[str, Any] = {"machine": machine.describe()}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "errors" in options.parts:
        result["errors"] = measure_errors()
    if "speed" in options.parts:
        if reason := netns.why_unavailable():
            sys.exit(f"bench.context_parallel: {reason}")
        result["rows"] = measure_speed(options.gbit, options.tokens, options.repetitions)
    if set(options.parts) != {"training"}:
        print(output.write("context_parallel", result, options.json))
    if "training" in options.parts:
        training = {"machine": machine.describe(), **measure_training(options.steps, options.seeds)}
        print(output.write("context_parallel_training", training, options.json, timed=False))
    return result


if __name__ == "__main__":
    wrong = [
        (row["gbit"], row["tokens"], name, error)
        for row in main().get("rows", [])
        for name, error in row["errors"].items()
        if not error < (0.05 if "8" in name or "16" in name else 1e-5)
    ]
    sys.exit(f"wrong results: {wrong}" if wrong else 0)
