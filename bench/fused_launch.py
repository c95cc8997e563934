"""Measure what the host does for one launch of a fused collective, without the kernel.

python -m bench.fused_launch [--json PATH]

A launch of tensors without elements takes the whole path of the host: Python's list of addresses, the check of which
tensors are present, the plan's kernel arguments with the new addresses, and no kernel. The emulator's module is used,
whose plan is the one of `_cuda`; a device adds the driver's time for a launch. Times are CPU time of this thread, the
least of several runs, because a machine with other load only adds to them. "plan" is what is done once for a shape.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import machine, output
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.measure.virtual_ranks import VirtualRanks
from dtcomm.runtime.cuda_peer.launch import EmulatorLauncher, FusedPlan, PartLaunch
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec

CASES = (("one_shot", "none"), ("two_shot", "none"), ("two_shot", "int8"))
CALLS, RUNS = 200, 15


def least_microseconds(run: Callable[[], object], calls: int = CALLS, runs: int = RUNS) -> float:
    """Return the least CPU time of a call, in microseconds."""
    best = float("inf")
    for _ in range(runs):
        begin = time.thread_time_ns()
        for _ in range(calls):
            run()
        best = min(best, (time.thread_time_ns() - begin) / calls / 1000)
    return best


def measure(ranks: int, calls: int = CALLS, runs: int = RUNS) -> list[dict[str, Any]]:
    """Return a row for each case: microseconds of planning once, and of a launch for all local ranks."""
    rows = []
    for algorithm, spec in CASES:
        virtual = VirtualRanks(ranks, box_bytes=1 << 20)
        schedule = algorithms.build(algorithm, "all_reduce", ranks)
        shape = OpSpec("all_reduce", "sum", (TensorSpec(1 << 16, torch.float32, codec(spec)),), algorithm)
        plan_us = least_microseconds(
            lambda s=shape, c=schedule, v=virtual: v.fused.prepare(s, c), max(1, calls // 20), 3
        )
        # A part without elements has no launch, so the launch of an empty tensor is planned by itself.
        part = shape.parts[0]._replace(numel=0)
        empty = shape._replace(parts=(part,))
        arguments = {**virtual.fused._kernel_spec(empty, part, None), "blocks": 1, "section": 1}
        plan = FusedPlan(empty, str(empty), (PartLaunch(0, EmulatorLauncher().plan(**arguments)),), 0)
        x = torch.empty(1)
        buffers = [[Buffers(x, x)] for _ in range(ranks)]
        rows.append(
            {
                "algorithm": algorithm,
                "codec": spec,
                "ranks": ranks,
                "plan_us": plan_us,
                "launch_us": least_microseconds(
                    lambda v=virtual, p=plan, b=buffers: v.fused.launch(p, b), calls, runs
                ),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and print; write the result if asked to; return it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args(arguments)
    rows = [row for ranks in (2, 8) for row in measure(ranks)]
    for row in rows:
        print(
            f"{row['ranks']} ranks  {row['algorithm']:<9} {row['codec']:<5} plan {row['plan_us']:>8.1f} us  "
            f"launch {row['launch_us']:>6.2f} us, {row['launch_us'] / row['ranks']:.2f} us a rank"
        )
    result = {"machine": machine.describe(), "rows": rows}
    if options.json:
        print(output.write("fused_launch", result, options.json))
    return result


if __name__ == "__main__":
    main()
