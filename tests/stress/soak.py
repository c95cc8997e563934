"""Random operations for a long time: subgroups made and destroyed, ranks killed and restarted under torchrun.

python -m tests.stress.soak [--minutes 30 | --kills K] [--ranks 3] [--life 20 180] [--pause 0.5] [--json FILE]

torchrun --max-restarts keeps the ranks alive; of each incarnation one rank kills itself (SIGKILL) after a random
time, and the others must raise an error that names it. Incarnations take turns with Gloo and dtcomm as the group's
backend. Results are compared among ranks and with the exact ones.
Memory and descriptors must be flat over each incarnation that lived long enough to tell. Exit status 1 otherwise.
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

from bench.common import machine, output
from tests.stress.soak_rank import POOL, ROUND, Life

CYCLE = POOL // ROUND  # rounds after which the same operations come again
SETTLED = CYCLE + 2  # rounds after which every plan has been made
MOST_GROWTH = {"rss_kib": 24 * 1024, "descriptors": 3, "threads": 2}


def growth(rounds: list[dict[str, Any]]) -> dict[str, float] | None:
    """By what is held, the most in the last cycle of rounds less that in the first settled one; None: too few rounds.

    The most of a whole cycle, since a round holds what its operations need: pairs of ranks that never talked in it
    have no communicators.
    """
    settled = rounds[SETTLED:]
    if len(settled) < 2 * CYCLE:
        return None
    return {
        name: max(each[name] for each in settled[-CYCLE:]) - max(each[name] for each in settled[:CYCLE])
        for name in MOST_GROWTH
    }


def read(folder: Path) -> list[dict[str, Any]]:
    """What every rank of every incarnation left: its rounds, its growth and how it ended."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        incarnation, rank = (int(part) for part in path.name.split(".")[:2])
        rounds = [line for line in lines if line["event"] == "round"]
        start = next((line for line in lines if line["event"] == "start"), {})
        found.append(
            {
                "incarnation": incarnation,
                "rank": rank,
                "pid": start.get("pid"),
                "victim": start.get("victim"),
                "backend": start.get("backend"),
                "operations": rounds[-1]["operations"] if rounds else 0,
                "wrong": [each for line in rounds for each in (*line["unequal"], *line["differs"])],
                "last": rounds[-1] if rounds else None,
                "growth": growth(rounds),
                "ended": lines[-1]["event"] if lines else "nothing",
                "error": next((line for line in lines if line["event"] == "lost"), None),
            }
        )
    return found


def complaints(found: list[dict[str, Any]]) -> list[str]:
    """What is wrong, in words."""
    bad = []
    for each in found:
        who = f"incarnation {each['incarnation']}, rank {each['rank']}"
        bad += [f"{who}: {what}" for what in each["wrong"]]
        for name, most in MOST_GROWTH.items():
            if each["growth"] is not None and each["growth"][name] > most:
                bad.append(f"{who}: {name} grew by {each['growth'][name]:g}")
        error = each["error"]
        # Who waits for a rank that gave up may be told by Gloo; who waits in dtcomm must name the culprit.
        named = error is None or error["error"] == "RuntimeError" or "rank" in error["message"]
        if not named:
            bad.append(f"{who}: {error['error']} names nobody: {error['message']}")
    if not any(each["ended"] == "end" for each in found):
        bad.append("no incarnation came to the end")
    return bad


def left_behind(pids: list[int]) -> list[int]:
    """Those that are still there."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs, prints, writes the file; returns what it wrote."""
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
    parser.add_argument("--json", help="where to write instead of bench/results/soak.json")
    options = parser.parse_args(arguments)
    started = time.time()
    with TemporaryDirectory(prefix="dtcomm-soak-") as name:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=100000"]
        command += [
            "--monitor-interval=0.5",
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
        )
        command += [name, json.dumps(vars(life))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with open(Path(name) / "log", "w") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        found = read(Path(name))
        if done.returncode != 0:
            print((Path(name) / "log").read_text()[-3000:])
    bad = complaints(found)
    if done.returncode != 0:
        bad.append(f"torchrun ended with {done.returncode}")
    if left := left_behind([each["pid"] for each in found if each["pid"]]):
        bad.append(f"processes left behind: {left}")
    incarnations = 1 + max((each["incarnation"] for each in found), default=-1)
    operations = sum(each["operations"] for each in found if each["rank"] == 0)
    grown = [each["growth"] for each in found if each["growth"] is not None]
    worst = {what: max((each[what] for each in grown), default=0) for what in MOST_GROWTH}
    errors: dict[str, int] = {}
    for each in found:
        if each["error"] is not None:
            errors[each["error"]["error"]] = errors.get(each["error"]["error"], 0) + 1
    minutes = (time.time() - started) / 60
    print(
        f"{minutes:.1f} minutes, {options.ranks} ranks, {incarnations} incarnations, {operations} operations a rank; "
        f"largest growth in {len(grown)} of them: {worst['rss_kib'] / 1024:.1f} MiB, {worst['descriptors']:g} "
        f"descriptors; survivors saw {errors}"
    )
    print("\n".join(bad) or "nothing lost")
    result = {
        "machine": machine.describe(),
        "minutes": round(minutes, 2),
        "ranks": options.ranks,
        "incarnations": incarnations,
        "operations": operations,
        "growth": worst,
        "errors": errors,
        "complaints": bad,
        "verdict": "MISS" if bad else "PASS",
        "runs": found,
    }
    kept = ("incarnation", "rank", "victim", "backend", "operations", "growth", "ended", "error")
    runs = [{name: run[name] for name in kept} for run in found]
    print(output.write("soak", {**result, "runs": runs}, options.json), result["verdict"])
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
