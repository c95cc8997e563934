"""Measure a step of a pipeline whose two stages are on two hosts, with compressed activations beside uncompressed ones.

python -m bench.pipeline [--gbit 0.5 1 10] [--width 32 128] [--tokens N] [--schedule gpipe 1f1b] [--repetitions N]
    [--json FILE]

Two ranks of one thread each run in two network namespaces, connected by a link of the rate `--gbit` (needs root and
iproute2). Each has a stage of residual MLP layers in fp32; a step has 8 micro-batches of `--tokens`. The contestants,
which take turns, are torch's stages on Gloo and dtcomm's stages with codecs for activations and gradients. "no
communication" is a stage's computation without messages, plus the bubble that the schedule has anyway. The difference
to "none" is communication that is not hidden; where it is three quarters of the time or more, int8 has a target.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from bench.common import machine, output
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.turns import in_turn
from dtcomm import pipeline
from dtcomm.measure import netns

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICRO, ROWS = 8, 4  # micro-batches, and sequences of each
TORCH, NONE, ALONE = "torch", "none", "no communication"
#: Contestant → options of `dtcomm.pipeline.compress`.
CONTESTANTS: dict[str, dict[str, Any]] = {
    NONE: {"spec": "none"},
    "bf16": {"spec": "bf16"},
    "int8": {"spec": "int8"},
    "int4 differences, gradients int8": {"spec": "int4", "backward_codec": "int8", "differences": True},
}
#: Required speed-up of "int8" over "none" where communication is at least this share of the time.
FASTER, DOMINANT_SHARE = 2.5, 0.75


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


class Rank:
    """One stage in a namespace of its own."""

    def __init__(self, rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
        netns.init_process_group(rank, ranks, rendezvous, namespaces)
        self.rank, self.ranks = rank, ranks
        self._steps: dict[tuple[str, str, int], tuple[Any, Any, Any]] = {}

    def measure(self, name: str, schedule: str, width: int, tokens: int, iters: int) -> float:
        """Return this rank's mean seconds of ``iters`` steps that follow each other without a pause."""
        step = self._step(name, schedule, width, tokens)
        dist.barrier()
        step()
        start = time.perf_counter()
        for _ in range(iters):
            step()
        return (time.perf_counter() - start) / iters

    def gradients(self, name: str, schedule: str, width: int, tokens: int) -> torch.Tensor:
        """Return the gradients of this rank's stage after one step."""
        step = self._step(name, schedule, width, tokens)
        step()
        module = self._steps[(name, schedule, width)][0]
        return torch.cat([p.grad.flatten() for p in module.parameters()])

    def bubble(self, schedule: str, width: int, tokens: int) -> tuple[float, float]:
        """Return the bubble that the schedule has, and the measured one with int8, messages included."""
        self._step("int8", schedule, width, tokens)()
        _, run, state = self._steps[("int8", schedule, width)]
        return pipeline.bubble_fraction(run), state.bubble_fraction()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _step(self, name: str, schedule: str, width: int, tokens: int) -> Any:
        key = (name, schedule, width)
        if key not in self._steps:
            torch.manual_seed(self.rank)
            module = Layer(width)
            stage = PipelineStage(module, self.rank, self.ranks, torch.device("cpu"))
            state = None
            if name in CONTESTANTS:
                state = pipeline.compress(stage, **CONTESTANTS[name])
            self._steps[key] = module, SCHEDULES[schedule](stage, MICRO, loss_fn=loss_of), state
        module, run, state = self._steps[key]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(MICRO * ROWS, tokens // ROWS, width, generator=generator)

        def step() -> None:
            module.zero_grad()
            if name == ALONE:
                for part in x.chunk(MICRO):
                    loss_of(module(part.requires_grad_()), part.detach()).backward()
                return
            if state is not None and CONTESTANTS[name].get("differences"):
                state.set_samples(range(len(x)))
            run.step(*([x] if self.rank == 0 else []), target=x if self.rank else None)

        return step


def measure(
    gbits: list[float], widths: list[int], tokens: int, schedules: list[str], repetitions: int
) -> list[dict[str, Any]]:
    """Measure and print a row for each rate, width and schedule; the contestants take turns."""
    rows = []
    for gbit in gbits:
        with netns.two_hosts(gbit) as namespaces, TemporaryDirectory() as folder:
            rendezvous = str(Path(folder) / "rendezvous")
            with Pool(Rank, 2, timeout=300, rendezvous=rendezvous, namespaces=namespaces) as pool:
                rows += [
                    _row(pool, gbit, {"schedule": schedule, "width": width, "tokens": tokens}, repetitions)
                    for width in widths
                    for schedule in schedules
                ]
    names = [TORCH, *CONTESTANTS, ALONE]
    lines = []
    for row in rows:
        cells = [
            f"{row['gbit']:g} Gbit/s, width {row['width']}, {row['schedule']}",
            f"{100 * row['communication']:.0f} %",
        ]
        for name in names:
            ratio = row["ratios"].get(name)
            milliseconds = f"{row['contestants'][name]['median_us'] / 1e3:.3g}"
            cells.append(milliseconds if ratio is None else f"{milliseconds}: {ratio:.2f}x")
        lines.append(cells)
    output.table("ms of a step, and times faster than none", ["", "communication", *names], lines)
    print("\n".join(row["verdict"] for row in rows))
    return rows


def _row(pool: Any, gbit: float, case: dict[str, Any], repetitions: int) -> dict[str, Any]:
    names = [TORCH, *CONTESTANTS, ALONE]
    gradients = {name: pool.call("gradients", name=name, **case) for name in names if name != ALONE}
    errors = {
        name: max(float((a - b).norm() / b.norm()) for a, b in zip(of_ranks, gradients[TORCH], strict=True))
        for name, of_ranks in gradients.items()
    }
    iters = {name: iterations(max(pool.call("measure", name=name, iters=1, **case)), 0.2) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        for name in in_turn(names, repetition):
            times[name].append(max(pool.call("measure", name=name, iters=iters[name], **case)))
    computed, measured = pool.call("bubble", **case)[0]
    times[ALONE] = [seconds / (1 - computed) for seconds in times[ALONE]]
    timings = {name: Timing.of(series) for name, series in times.items()}
    plain = timings[NONE].median
    share = max(0.0, 1 - timings[ALONE].median / plain)
    ratios = {name: round(plain / timing.median, 3) for name, timing in timings.items() if name != NONE}
    text, ratio = f"{gbit:g} Gbit/s, width {case['width']}, {case['schedule']}", ratios["int8"]
    if share >= DOMINANT_SHARE:
        verdict = f"{'PASS' if ratio >= FASTER else 'MISS'} {text}: int8 {ratio:.2f}x, at least {FASTER:g}"
    else:
        verdict = (
            f"no target {text}: communication is {100 * share:.0f} % of the time, so nothing could be more than "
            f"{1 / (1 - share):.1f}x as fast; int8 is {ratio:.2f}x"
        )
    return {
        "gbit": gbit,
        **case,
        "communication": round(share, 3),
        "bubble": round(computed, 3),
        "waiting": round(measured, 3),
        "load": machine.load(),
        "contestants": {name: timing.as_dict() for name, timing in timings.items()},
        "ratios": ratios,
        "errors": {name: float(f"{error:.3g}") for name, error in errors.items()},
        "verdict": verdict,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and write the file; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.5, 1, 10])
    parser.add_argument("--width", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--schedule", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="where to write instead of bench/results/pipeline.json")
    options = parser.parse_args(arguments)
    if reason := netns.why_unavailable():
        sys.exit(f"bench.pipeline: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = measure(options.gbit, options.width, options.tokens, options.schedule, options.repetitions)
    result: dict[str, Any] = {"machine": machine.describe(), "rows": rows}
    print(output.write("pipeline", result, options.json))
    return result


if __name__ == "__main__":
    wrong = [
        (row["gbit"], row["width"], row["schedule"], name, error)
        for row in main()["rows"]
        for name, error in row["errors"].items()
        if not error <= (0.0 if name == NONE else 0.1)
    ]
    sys.exit(f"wrong results: {wrong}" if wrong else 0)
