"""Run random operations for a long time, with new subgroups, and ranks that are killed and restarted by torchrun.

python -m tests.stress.soak [--minutes 30 | --kills K] [--ranks 3] [--life 20 180] [--pause 0.5] [--seed 0]
[--json FILE]

torchrun --max-restarts keeps the ranks alive; of each incarnation one rank kills itself (SIGKILL) after a random
time, and the others must raise an error that names it. Incarnations take turns with Gloo and dtcomm as the group's
backend. Results are compared among ranks and with the exact ones. Memory and
descriptors must not grow in incarnations that are long enough to measure it. The exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import report
from tests.stress import DETAILS
from tests.stress.soak_rank import POOL, ROUND, Life

CYCLE = POOL // ROUND  # rounds after which the operations repeat
SETTLED = CYCLE + 2  # rounds after which every plan exists
MOST_GROWTH = {"rss_kib": 24 * 1024, "descriptors": 3, "threads": 2}


def growth(rounds: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return how much each resource grew from the first settled cycle of rounds to the last; None: too few rounds.

    The maximum of a whole cycle counts, because resources depend on a round's operations: pairs of ranks that exchange
    nothing in it have no communicators.
    """
    settled = rounds[SETTLED:]
    if len(settled) < 2 * CYCLE:
        return None
    return {
        name: max(sample[name] for sample in settled[-CYCLE:])
        - max(sample[name] for sample in settled[:CYCLE])
        for name in MOST_GROWTH
    }


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the rounds, the growth and the end of every rank of every incarnation."""
    runs = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        incarnation, rank = (int(part) for part in path.name.split(".")[:2])
        rounds = [line for line in lines if line["event"] == "round"]
        start = next((line for line in lines if line["event"] == "start"), {})
        runs.append(
            {
                "incarnation": incarnation,
                "rank": rank,
                "pid": start.get("pid"),
                "victim": start.get("victim"),
                "backend": start.get("backend"),
                "operations": rounds[-1]["operations"] if rounds else 0,
                "wrong": [text for line in rounds for text in (*line["unequal"], *line["differs"])],
                "last": rounds[-1] if rounds else None,
                "growth": growth(rounds),
                "ended": lines[-1]["event"] if lines else "nothing",
                "error": next((line for line in lines if line["event"] == "lost"), None),
            }
        )
    return runs


def complaints(runs: list[dict[str, Any]]) -> list[str]:
    """Return descriptions of what is wrong."""
    bad = []
    for run in runs:
        reporter = f"incarnation {run['incarnation']}, rank {run['rank']}"
        bad += [f"{reporter}: {text}" for text in run["wrong"]]
        for name, most in MOST_GROWTH.items():
            if run["growth"] is not None and run["growth"][name] > most:
                bad.append(f"{reporter}: {name} grew by {run['growth'][name]:g}")
        error = run["error"]
        # A rank that waits in Gloo gets Gloo's error (RuntimeError); errors of dtcomm must name the lost rank.
        names_a_rank = error is None or error["error"] == "RuntimeError" or "rank" in error["message"]
        if not names_a_rank:
            bad.append(f"{reporter}: {error['error']} names no rank: {error['message']}")
    if not any(run["ended"] == "end" for run in runs):
        bad.append("no incarnation ran to the end")
    return bad


def left_behind(pids: list[int]) -> list[int]:
    """Return those processes that still exist."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kills", type=int, help="end when so many incarnations were killed, instead")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument(
        "--life", type=float, nargs=2, default=[20.0, 180.0], help="least and most seconds of one"
    )
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="where to write instead of build/stress/soak.json")
    options = parser.parse_args(arguments)
    started = time.time()
    with TemporaryDirectory(prefix="dtcomm-soak-") as name:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=100000"]
        command += [
            "--monitor-interval=2",  # seconds for the survivors to say what they saw, before torchrun ends them
            f"--nproc-per-node={options.ranks}",
            "-m",
            "tests.stress.soak_rank",
        ]
        life = Life(
            until=started + options.minutes * 60,
            kills=options.kills,
            pause=options.pause,
            shortest=options.life[0],
            longest=options.life[1],
            seed=options.seed,
        )
        command += [name, json.dumps(vars(life))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with open(Path(name) / "log", "w") as log:
            completed = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        runs = read(Path(name))
        if completed.returncode != 0:
            print((Path(name) / "log").read_text()[-3000:])
    bad = complaints(runs)
    if completed.returncode != 0:
        bad.append(f"torchrun ended with {completed.returncode}")
    if remaining := left_behind([run["pid"] for run in runs if run["pid"]]):
        bad.append(f"processes left behind: {remaining}")
    incarnations = 1 + max((run["incarnation"] for run in runs), default=-1)
    operations = sum(run["operations"] for run in runs if run["rank"] == 0)
    grown = [run["growth"] for run in runs if run["growth"] is not None]
    worst = {resource: max((run[resource] for run in grown), default=0) for resource in MOST_GROWTH}
    errors: dict[str, int] = {}
    for run in runs:
        if run["error"] is not None:
            errors[run["error"]["error"]] = errors.get(run["error"]["error"], 0) + 1
    minutes = (time.time() - started) / 60
    print(
        f"{minutes:.1f} minutes, {options.ranks} ranks, {incarnations} incarnations, {operations} operations a rank; "
        f"largest growth in {len(grown)} of them: {worst['rss_kib'] / 1024:.1f} MiB, {worst['descriptors']:g} "
        f"descriptors; survivors saw {errors}"
    )
    print("\n".join(bad) or "no complaints")
    result = {
        "minutes": round(minutes, 2),
        "ranks": options.ranks,
        "incarnations": incarnations,
        "operations": operations,
        "growth": worst,
        "errors": errors,
        "complaints": bad,
        "verdict": "MISS" if bad else "PASS",
        "runs": runs,
    }
    columns = ("incarnation", "rank", "victim", "backend", "operations", "growth", "ended", "error")
    runs = [{name: run[name] for name in columns} for run in runs]
    print(
        report.write(options.json or DETAILS / "soak.json", {**result, "runs": runs}),
        result["verdict"],
    )
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
