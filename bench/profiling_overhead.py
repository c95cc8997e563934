"""Measure what recording a timeline costs: python -m bench.profiling_overhead [--json FILE] [--picture FILE].

Two ranks train an MLP with int8 gradients. Steps with a timeline, with torch's profiler and with neither take turns in
blocks within every repetition. The cost is the ratio of the medians over blocks. --picture plots steps of the same
ranks over an emulated link (DTCOMM_LINK), where communication takes visible time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.common import machine
from bench.common.output import table, write
from dtcomm import ddp
from dtcomm.cli.trace import main as draw
from dtcomm.launch.ranks import run_ranks

STEPS = 5  # in a block; blocks are short, so that other load of the machine affects all kinds alike
KINDS = ("off", "timeline", "profiler")
WIDTH, DEPTH = 384, 6
TARGET = 1.01  # of the time of a step


def trained(spec: str) -> tuple[DistributedDataParallel, ddp.State, Any]:
    """Return a perceptron of several buckets as DDP, its hook's state, and a function that runs a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    x = torch.randn(64, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return model, ddp.compress(model, spec), step


def blocks(rank: int, ranks: int, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of a step in every block, by kind."""
    _, state, step = trained("int8")
    for _ in range(20):
        step()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repetition in range(repetitions):
        for kind in KINDS[repetition % len(KINDS) :] + KINDS[: repetition % len(KINDS)]:
            if kind == "timeline":
                state.timeline.start(STEPS)
            profile = torch.profiler.profile() if kind == "profiler" else None
            if profile is not None:
                profile.start()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            seconds[kind].append((time.perf_counter() - begin) / STEPS)
            if profile is not None:
                profile.stop()
            state.timeline.stop()
    return seconds


def pictured(rank: int, ranks: int, folder: str) -> str:
    """Write a trace of 20 steps; return its path."""
    _, state, step = trained("int8")
    for _ in range(10):
        step()
    state.timeline.start(20)
    for _ in range(21):
        step()
    return state.trace(f"{folder}/steps.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--json", help="where to write instead of bench/results/profiling_overhead.json")
    parser.add_argument("--picture", type=Path, help="plot a step there instead of measuring")
    parser.add_argument("--link", default="1gbit,50us", help="the link of the plot, as DTCOMM_LINK")
    options = parser.parse_args()
    if options.picture:
        with tempfile.TemporaryDirectory() as folder:
            traces = run_ranks(pictured, 2, folder, env={"DTCOMM_LINK": options.link}, fresh=True)
            return draw([*traces, "--plot", str(options.picture)])
    seconds_by_rank = run_ranks(blocks, 2, options.repetitions, timeout=200, fresh=True)
    # The time of a block is that of its slower rank.
    times = {
        kind: [max(pair) for pair in zip(*(seconds[kind] for seconds in seconds_by_rank), strict=True)]
        for kind in KINDS
    }
    rows, result = [], {}
    for kind in KINDS:
        ratios = [with_kind / off for with_kind, off in zip(times[kind], times["off"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        result[kind] = {
            "step_ms": statistics.median(times[kind]) * 1e3,
            "ratio": statistics.median(times[kind]) / statistics.median(times["off"]),
            "ratio_quartiles": [quarters[0], quarters[2]],
        }
        spread = f"{quarters[0]:.3f} to {quarters[2]:.3f}"
        rows.append((kind, f"{result[kind]['step_ms']:.3f}", f"{result[kind]['ratio']:.3f}", spread))
    table("a step while recording", ("recorded", "ms per step", "ratio", "quartiles of the ratio"), rows)
    met = result["timeline"]["ratio"] <= TARGET
    print(f"{'PASS' if met else 'MISS'}: a timeline costs at most {TARGET - 1:.0%} of a step")
    record = {"machine": machine.describe(), "steps": result, "target": TARGET, "met": met}
    print(write("profiling_overhead", record, options.json))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
