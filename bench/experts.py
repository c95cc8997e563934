"""Measure experts on two hosts: the time of their all-to-alls, and a mixture trained beside a dense model.

python -m bench.experts [speed] [training] [--gbit 1 10] [--choices 1 2] [--repetitions N] [--steps N]
    [--seeds 0 1 2] [--json FILE]

- speed: two ranks of one thread each in two network namespaces connected by a link of `--gbit` Gbit/s (needs root and
  iproute2) send 4096 tokens of 1024 features to their experts: "dispatch" is what arrives in the experts' order,
  "forward and backward" adds the results' way back and the gradients of both. "torch" does the same with
  torch.distributed's all_to_all_single over Gloo, in the dtype of the tokens: a row for each choice. The contestants
  take turns. With one choice no token goes twice to a rank; with two the "dtcomm" contestants send it once.
- training: the demo's GPT on its text with data on two ranks, dense, and with a mixture of four experts on these ranks
  in place of every MLP, with two choices and experts of half the dense width, so that a token takes as many
  multiplications; in several codecs. Held-out loss in nats per character. The spread is that of the seeds without
  compression.
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
from torch import nn

from bench.common import machine, output
from bench.common import seeds as seeds_of
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.turns import in_turn
from dtcomm import moe
from dtcomm.cli.demo import train as demo
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure import netns

PARTS = ("speed", "training")
TORCH, NONE, FP8 = "torch", "dtcomm none", "dtcomm fp8, bf16 back"
TOKENS, FEATURES, EXPERTS = 4096, 1024, 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Contestant → options of `dispatch`.
CONTESTANTS: dict[str, dict[str, str]] = {
    NONE: {"codec": "none"},
    FP8: {},
    "dtcomm fp8 throughout": {"combine_codec": "fp8_e4m3", "backward_codec": "fp8_e4m3"},
    "dtcomm mxfp4, bf16 back": {"codec": "mxfp4"},
}
#: Operation → the contestant whose speed-up over torch has a target.
TARGETS = {"dispatch": FP8, "forward and backward": "dtcomm fp8 throughout"}
FASTER = 1.8
SHAPE = demo.ModelShape(vocabulary=demo.VOCABULARY, context=96, layers=2, width=64, heads=4)
SIZE, RATE, TRAINED_EXPERTS = 6, 3e-3, 4
DENSE, UNCOMPRESSED = "dense", "mixture, none"
#: Run → options of `MoE`; None: the dense model.
RUNS: dict[str, dict[str, Any] | None] = {
    DENSE: None,
    UNCOMPRESSED: {"codec": "none"},
    "mixture, fp8 and bf16": {},
    "mixture, fp8 throughout": {"combine_codec": "fp8_e4m3", "backward_codec": "fp8_e4m3"},
    "mixture, mxfp8 and bf16": {"codec": "mxfp8"},
    "mixture, mxfp4 and bf16": {"codec": "mxfp4"},
    "mixture, fp8 and bf16, capacity 1.25": {"capacity_factor": 1.25},
}

# --- speed ------------------------------------------------------------------------------------------------------------


class _TorchExchange(torch.autograd.Function):
    """torch.distributed's all-to-all of rows, and of gradients in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sent, ctx.received = sent, received
        return _exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchange(gradient.contiguous(), ctx.received, ctx.sent), None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    # Gloo's all-to-all has no bf16; bytes take as long.
    dist.all_to_all_single(arrived.view(torch.uint8), rows.view(torch.uint8), received, sent)
    return arrived


def torch_dispatch(
    x: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    """Dispatch with torch.distributed alone; return the rows by expert and the function that combines results."""
    ranks, choices = dist.get_world_size(), experts.shape[1]
    order = torch.argsort(experts.flatten(), stable=True)
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts)
    sent, received = (c.view(ranks, -1).sum(1).tolist() for c in (counts, received_counts))
    numbers = torch.arange(EXPERTS // ranks).repeat(ranks).repeat_interleave(received_counts)
    by_expert = torch.argsort(numbers, stable=True)
    arrived: torch.Tensor = _TorchExchange.apply(  # type: ignore[no-untyped-call]
        x.index_select(0, order // choices), sent, received
    )

    def combine(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = outputs.index_select(0, torch.argsort(by_expert))
        returned: torch.Tensor = _TorchExchange.apply(rows, received, sent)  # type: ignore[no-untyped-call]
        results = returned.index_select(0, torch.argsort(order)).view(len(x), choices, -1)
        return (results * weights[:, :, None].to(results.dtype)).sum(1)

    return arrived.index_select(0, by_expert), combine


class Rank:
    """One rank in a namespace of its own."""

    def __init__(self, rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
        netns.init_process_group(rank, ranks, rendezvous, namespaces)
        generator = torch.Generator().manual_seed(rank)
        self._x = torch.randn(TOKENS, FEATURES, generator=generator)
        self._upstream = torch.randn(TOKENS, FEATURES, generator=generator)
        self._scores = torch.rand(TOKENS, EXPERTS, generator=generator)

    def measure(self, name: str, operation: str, dtype: str, choices: int, iters: int) -> float:
        """Return this rank's mean seconds of ``iters`` calls that follow each other without a pause."""
        call = self._call(name, operation, dtype, choices)
        dist.barrier()
        call()
        start = time.perf_counter()
        for _ in range(iters):
            call()
        return (time.perf_counter() - start) / iters

    def error(self, name: str, operation: str, dtype: str, choices: int) -> float:
        """Return the relative error (L2 norms) of a contestant's result beside that of torch."""
        expected = self._call(TORCH, operation, dtype, choices)().float()
        return float(
            (self._call(name, operation, dtype, choices)().float() - expected).norm() / expected.norm()
        )

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _call(self, name: str, operation: str, dtype: str, choices: int) -> Callable[[], torch.Tensor]:
        x, upstream = (tensor.to(DTYPES[dtype], copy=True) for tensor in (self._x, self._upstream))
        weights, experts = self._scores.topk(choices, 1)
        backward = operation != "dispatch"
        x.requires_grad_(backward)

        def call() -> torch.Tensor:
            if name == TORCH:
                rows, combine = torch_dispatch(x, experts)
                y = combine(rows, weights) if backward else rows
            else:
                options: Any = CONTESTANTS[name]
                rows, route = moe.dispatch(x, experts, EXPERTS, **options)
                y = moe.combine(rows, route, weights) if backward else rows
            return torch.autograd.grad(y, x, upstream)[0] if backward else y

        return call


def measure_speed(gbits: list[float], choices: list[int], repetitions: int) -> list[dict[str, Any]]:
    """Measure and print a row for each rate, dtype, number of choices and operation; the contestants take turns."""
    rows = []
    for gbit in gbits:
        with netns.two_hosts(gbit) as namespaces, TemporaryDirectory() as folder:
            rendezvous = str(Path(folder) / "rendezvous")
            with Pool(Rank, 2, timeout=300, rendezvous=rendezvous, namespaces=namespaces) as pool:
                rows += [
                    _speed_row(pool, gbit, dtype, count, operation, repetitions)
                    for dtype in DTYPES
                    for count in choices
                    for operation in TARGETS
                ]
    names = [TORCH, *CONTESTANTS]
    lines = []
    for row in rows:
        cells = [row["case"]]
        for name in names:
            ratio = row["ratios"].get(name)
            milliseconds = f"{row['contestants'][name]['median_us'] / 1e3:.3g}"
            cells.append(milliseconds if ratio is None else f"{milliseconds}: {ratio:.2f}x")
        lines.append(cells)
    output.table("ms, and times faster than torch", ["", *names], lines)
    print("\n".join(row["verdict"] for row in rows))
    return rows


def _speed_row(
    pool: Any, gbit: float, dtype: str, choices: int, operation: str, repetitions: int
) -> dict[str, Any]:
    names = [TORCH, *CONTESTANTS]
    arguments = {"operation": operation, "dtype": dtype, "choices": choices}
    errors = {name: max(pool.call("error", name=name, **arguments)) for name in CONTESTANTS}
    iters = {
        name: iterations(max(pool.call("measure", name=name, iters=1, **arguments)), 0.2) for name in names
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        for name in in_turn(names, repetition):
            times[name].append(max(pool.call("measure", name=name, iters=iters[name], **arguments)))
    timings = {name: Timing.of(series) for name, series in times.items()}
    plain = timings[TORCH].median
    ratios = {name: round(plain / timing.median, 3) for name, timing in timings.items() if name != TORCH}
    case = f"{gbit:g} Gbit/s, {dtype}, {choices} of {EXPERTS}, {operation}"
    ratio = ratios[TARGETS[operation]]
    verdict = f"{'PASS' if ratio >= FASTER else 'MISS'} {case}: {TARGETS[operation]} {ratio:.2f}x, at least {FASTER:g}"
    return {
        "case": case,
        "gbit": gbit,
        **arguments,
        "load": machine.load(),
        "contestants": {name: timing.as_dict() for name, timing in timings.items()},
        "ratios": ratios,
        "errors": {name: float(f"{error:.3g}") for name, error in errors.items()},
        "verdict": verdict,
    }


# --- training ---------------------------------------------------------------------------------------------------------


class MixtureBlock(demo.Block):
    """The demo's block with experts of half its MLP's width in place of the MLP; two of them see a token."""

    def __init__(self, shape: demo.ModelShape, options: dict[str, Any]) -> None:
        super().__init__(shape)
        del self.up, self.down
        self.mixture = moe.MoE(shape.width, TRAINED_EXPERTS, lambda: _expert(shape), **options)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mixture(x)
        return mixed


def _expert(shape: demo.ModelShape) -> nn.Module:
    hidden = 2 * shape.width
    expert = nn.Sequential(nn.Linear(shape.width, hidden), nn.GELU(), nn.Linear(hidden, shape.width))
    for layer, std in ((expert[0], shape.width**-0.5), (expert[2], (2 * shape.layers * shape.width) ** -0.5)):
        nn.init.normal_(layer.weight, std=std)  # type: ignore[arg-type]
    return expert


def train(rank: int, ranks: int, options: dict[str, Any] | None, steps: int, seed: int) -> dict[str, float]:
    """Train with data on all ranks; return the held-out loss, and statistics of the last layer's router."""
    torch.set_num_threads(1)
    corpus = demo.load_corpus(limit=2_000_000)
    torch.manual_seed(seed)
    model = demo.GPT(SHAPE)
    if options is not None:
        model.blocks = nn.Sequential(*(MixtureBlock(SHAPE, options) for _ in range(SHAPE.layers)))
        for name, parameter in model.named_parameters():
            if name.endswith(("qkv.weight", "projection.weight")):
                shrink = (2 * SHAPE.layers) ** -0.5 if "projection" in name else 1.0
                nn.init.normal_(parameter, std=SHAPE.width**-0.5 * shrink)
    experts = {id(parameter) for parameter in moe.expert_parameters(model).values()}
    shared = [parameter for parameter in model.parameters() if id(parameter) not in experts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    warmup = max(1, steps // 20)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (
                (step + 1) / warmup if step < warmup else 1 - 0.99 * (step - warmup) / (steps - warmup)
            )
        inputs, targets = demo.training_batch(
            corpus, seed=seed, step=step, rank=rank, size=SIZE, length=SHAPE.context
        )
        optimizer.zero_grad()
        (demo.cross_entropy(model, inputs, targets) + moe.auxiliary_loss(model)).backward()
        gradients = [parameter.grad for parameter in shared if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, mean in zip(
            gradients, torch.split(flat / ranks, [g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))
        optimizer.step()
    batches = demo.held_out_batches(
        corpus, windows=192, size=48, length=SHAPE.context, rank=rank, ranks=ranks
    )
    with torch.no_grad():
        total = torch.stack([demo.cross_entropy(model, *batch) for batch in batches]).mean()
    dist.all_reduce(total)
    result = {"loss": float(total) / ranks}
    mixtures = [module for module in model.modules() if isinstance(module, moe.MoE)]
    if mixtures and mixtures[-1].statistics is not None:
        result |= mixtures[-1].statistics.to_dict()
    return result


def measure_training(steps: int, seeds: list[int]) -> dict[str, Any]:
    """Train all runs and print their held-out losses."""
    losses: dict[str, list[float]] = {name: [] for name in RUNS}
    routers: dict[str, dict[str, float]] = {}
    for seed in seeds:
        for name, options in RUNS.items():
            result = run_ranks(train, 2, options, steps, seed, timeout=600)[0]
            losses[name].append(round(result.pop("loss"), 4))
            routers[name] = {key: round(value, 3) for key, value in result.items()}
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f} {routers[name] or ''}", flush=True)
    title = f"held-out loss, {steps} steps, 2 ranks"
    compared = seeds_of.compare(losses, UNCOMPRESSED, seeds=seeds, title=title, without_target=(DENSE,))
    return {"steps": steps, **compared, "routers": routers}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what was asked for, print it and write the file; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--choices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--json", help="where to write instead of bench/results/experts.json, or experts_training.json"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; valid: {', '.join(PARTS)}")
    if options.json and {"training"} < set(options.parts):
        parser.error("--json: training has a file of its own; ask for the other parts in another call")
    result: dict[str, Any] = {"machine": machine.describe()}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "speed" in options.parts:
        if reason := netns.why_unavailable():
            sys.exit(f"bench.experts: {reason}")
        result["rows"] = measure_speed(options.gbit, options.choices, options.repetitions)
        print(output.write("experts", result, options.json))
    if "training" in options.parts:
        training = {"machine": machine.describe(), **measure_training(options.steps, options.seeds)}
        print(output.write("experts_training", training, options.json, timed=False))
    return result


if __name__ == "__main__":
    wrong = [
        (row["case"], name, error)
        for row in main().get("rows", [])
        for name, error in row["errors"].items()
        if not error < (0.15 if "fp4" in name else 0.06 if "fp8" in name else 0.01)
    ]
    sys.exit(f"wrong results: {wrong}" if wrong else 0)
