"""What ``compress(model, "auto")`` chooses in simulated runs, with step times that vary, drift and come in bursts.

python -m tests.stress.auto_choice [--runs 1000] [--steps 600] [--json FILE]

The tuner decides on simulated step times. A run is lost if it chooses a plan that is slower than plain DDP.
At most 1 % of runs may be lost, whatever the noise; where a plan is faster, the table shows how often it is chosen,
after how many steps, and how much time a step takes on average once all have chosen. The exit status is 1 if
more runs are lost than 1 % and its sampling error allow.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from typing import Any

from bench.common import report
from tests.stress import DETAILS
from tests.support.autotune_simulation import Noise, simulate

LOST_LIMIT = 0.01
NOISES = {
    "5 %": Noise(0.05),
    "10 %": Noise(0.1),
    "20 %": Noise(0.2),
    "10 %, drift": Noise(0.1, drift=0.05),
    "20 %, bursts": Noise(0.2, burst=0.03),
}
# Step times relative to plain DDP's.
WORLDS: dict[str, dict[str, float]] = {
    "2 % slower": {"none": 1.02, "fp8_e4m3": 1.02, "int8": 1.02, "mxfp8": 1.02},
    "2 to 8 % slower": {"none": 1.02, "fp8_e4m3": 1.04, "int8": 1.03, "mxfp8": 1.08},
    "10 % less time": {"none": 1.0, "fp8_e4m3": 0.95, "int8": 0.9, "mxfp8": 0.92},
    "20 % less time": {"none": 1.0, "fp8_e4m3": 0.9, "int8": 0.8, "mxfp8": 0.83},
    "half the time": {"none": 1.0, "fp8_e4m3": 0.7, "int8": 0.5, "mxfp8": 0.55},
}


def measure(world: str, noise: str, runs: int, steps: int) -> dict[str, Any]:
    """Return what the runs with one kind of step times chose."""
    seconds = {"plain": 1.0, **WORLDS[world]}
    simulated = [simulate(seconds, NOISES[noise], seed, steps=steps) for seed in range(runs)]
    times = {"plain DDP": 1.0, **WORLDS[world]}
    lost = sum(times.get(run.choice, 1.0) > 1.0 for run in simulated)
    faster = sum(times[run.choice] < 1.0 for run in simulated if run.choice)
    # Three standard deviations of the number of lost runs, if 1 % is the probability.
    limit = LOST_LIMIT * runs + 3 * math.sqrt(LOST_LIMIT * runs)
    return {
        "world": world,
        "noise": noise,
        "runs": runs,
        "lost": lost,
        "faster": faster,
        "median_steps": statistics.median(run.steps for run in simulated),
        "most_steps": max(run.steps for run in simulated),
        "mean_time": round(statistics.fmean(times.get(run.choice, 1.0) for run in simulated), 4),
        "verdict": "PASS" if lost <= limit else "MISS",
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Simulate, print the table, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000, help="of each kind")
    parser.add_argument("--steps", type=int, default=600, help="of each run")
    parser.add_argument("--json", help="where to write instead of build/stress/auto_choice.json")
    options = parser.parse_args(arguments)
    rows = []
    for world in WORLDS:
        for noise in NOISES:
            rows.append(row := measure(world, noise, options.runs, options.steps))
            print(f"{world}, noise {noise}: {row['lost']} of {row['runs']} lost", file=sys.stderr, flush=True)
    lines = [
        [
            row["world"],
            row["noise"],
            f"{row['lost'] / row['runs']:.1%}",
            f"{row['faster'] / row['runs']:.0%}",
            f"{row['median_steps']:.0f}",
            f"{row['most_steps']}",
            f"{row['mean_time']:.3f}",
            row["verdict"],
        ]
        for row in rows
    ]
    columns = [
        "plans take",
        "noise",
        "lost (1 %)",
        "a faster one",
        "steps",
        "most",
        "time of a step",
        "verdict",
    ]
    report.table(f"choices of auto in {options.runs} simulated runs of each kind", columns, lines)
    verdict = "MISS" if any(row["verdict"] == "MISS" for row in rows) else "PASS"
    result = {"steps": options.steps, "rows": rows, "verdict": verdict}
    print(
        report.write(options.json or DETAILS / "auto_choice.json", result),
        verdict,
    )
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
