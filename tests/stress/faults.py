"""The fault campaign: ranks die, stop, leave or make a wrong call, and the others must report it in time.

python -m tests.stress.faults [--repeat 20] [--ranks 2 3 4] [--kinds SIGKILL ...] [--rounds 1000] [--quick]

It writes bench/results/faults.json. The exit status is 1 if a survivor raised the wrong error, did not name the right
rank, was late, or left something behind.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import defaultdict
from typing import Any, cast

from bench.common import machine, output
from dtcomm.launch.ranks import RankOutcome, RunningRanks, run_ranks, spawn_ranks
from tests.stress.fault_ranks import Fault, Seen, rounds, survive

SMALL, LARGE = 16 << 10, 16 << 20  # floats: 64 KB and 64 MB
LIMIT_SECONDS = 2.0
GROUP_TIMEOUT = 3.0
DEADLY = ("SIGKILL", "SIGSTOP", "exit(0)", "exit(1)")
MISMATCHES = ("skipped call", "other shape", "other dtype", "other op", "other codec", "other collective")
EXPECTED = {
    **dict.fromkeys(("SIGKILL", "exit(0)", "exit(1)"), "PeerLost"),
    **dict.fromkeys(("SIGSTOP", "absent"), "CollectiveTimeout"),
    **dict.fromkeys(MISMATCHES, "CollectiveMismatch"),
}


def strike(ranks: RunningRanks, fault: Fault, world_size: int) -> tuple[float, int, list[int]]:
    """Wait until all ranks run, then let the fault happen.

    Returns:
        When it happened, the victim's pid, and the pids of children to end.
    """
    pids = [0] * world_size
    for rank in range(world_size):
        word = ranks.receive(rank)
        assert isinstance(word, tuple) and word[0] == "running"
        pids[rank] = word[1]
    children: list[int] = []
    if fault.fork:
        _, child = cast("tuple[str, int]", ranks.receive(fault.victim))
        children.append(child)
    if fault.kind.startswith("SIG"):
        time.sleep(fault.after)
        at = time.monotonic()
        ranks.kill(fault.victim, signal.Signals[fault.kind])
    else:
        _, at = cast("tuple[str, float]", ranks.receive(fault.victim))
    return at, pids[fault.victim], children


def attempt(fault: Fault, world_size: int) -> dict[str, Any]:
    """Cause one fault; ``faults`` of the result describes every violation."""
    children: list[int] = []
    try:
        with spawn_ranks(survive, world_size, fault, group_timeout=GROUP_TIMEOUT) as ranks:
            at, pid, children = strike(ranks, fault, world_size)
            if fault.kind == "SIGSTOP":
                time.sleep(GROUP_TIMEOUT + LIMIT_SECONDS)
                ranks.kill(fault.victim, signal.SIGKILL)
            outcomes = ranks.join(timeout=20)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    # The victim of a mismatch gets the error as well; other victims are dead or caused the fault themselves.
    reporting = [o for o in outcomes if o.rank != fault.victim or fault.kind in MISMATCHES]
    complaints: list[str] = []
    seconds = []
    for outcome in reporting:
        complaints += judge(fault, outcome, at, pid)
        if isinstance(outcome.result, Seen):
            seconds.append(outcome.result.at - at)
    return {"seconds": max(seconds, default=float("inf")), "faults": complaints}


def judge(fault: Fault, outcome: RankOutcome, at: float, pid: int) -> list[str]:
    """Return what is wrong with one survivor's report, each as a sentence."""
    reporter = f"rank {outcome.rank}"
    if not isinstance(outcome.result, Seen):
        return [f"{reporter}: {outcome.describe_failure()}"]
    seen, complaints = outcome.result, []
    if seen.error != EXPECTED[fault.kind]:
        complaints.append(
            f"{reporter}: {seen.error or 'no error'} instead of {EXPECTED[fault.kind]}: {seen.message}"
        )
    if f"rank {fault.victim}" not in seen.message:
        complaints.append(f"{reporter}: the message does not name rank {fault.victim}: {seen.message}")
    if seen.error == "PeerLost" and str(pid) not in seen.message:
        complaints.append(f"{reporter}: the message does not name pid {pid}: {seen.message}")
    took = seen.at - at
    allowed = LIMIT_SECONDS + (GROUP_TIMEOUT if EXPECTED[fault.kind] == "CollectiveTimeout" else 0)
    if took > allowed:
        complaints.append(f"{reporter}: {took:.2f} s instead of {allowed:g}")
    if seen.next_error in ("", "no error") or seen.next_seconds > 0.5:
        complaints.append(f"{reporter}: the next call gave {seen.next_error} after {seen.next_seconds:.2f} s")
    if seen.left:
        complaints.append(f"{reporter}: left behind {seen.left}")
    return complaints


def campaign(kinds: list[str], world_sizes: list[int], repeat: int, seed: int) -> list[dict[str, Any]]:
    """Run every kind ``repeat`` times per number of ranks, half of them in 64 MB calls; one with a forked child."""
    chance = random.Random(seed)
    rows = []
    for kind in kinds:
        for world_size in world_sizes:
            times, complaints = [], []
            for i in range(repeat):
                fault = Fault(
                    kind=kind,
                    victim=chance.randrange(world_size),
                    numel=LARGE if i % 2 == 0 else SMALL,
                    after=chance.uniform(0.1, 0.4),
                    fork=kind == "SIGKILL" and i == 0,
                )
                result = attempt(fault, world_size)
                times.append(result["seconds"])
                complaints += [f"{fault}: {complaint}" for complaint in result["faults"]]
            rows.append(
                {
                    "kind": kind,
                    "ranks": world_size,
                    "repeat": repeat,
                    "expected": EXPECTED[kind],
                    "worst_seconds": round(max(times), 3),
                    "complaints": complaints,
                }
            )
            verdict = f"worst {max(times):.2f} s, {len(complaints)} complaints"
            print(f"{kind:18} {world_size} ranks: {verdict}", flush=True)
            for complaint in complaints[:3]:
                print(f"    {complaint}", flush=True)
    return rows


def shared_files() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the campaign and the rounds, print, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument(
        "--kinds", nargs="+", choices=list(EXPECTED), default=[*DEADLY, *MISMATCHES, "absent"]
    )
    parser.add_argument("--rounds", type=int, default=1000, help="create-and-destroy rounds; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2 of each and 100 rounds")
    parser.add_argument("--json", help="where to write instead of bench/results/faults.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeat, options.rounds = min(options.repeat, 2), min(options.rounds, 100)

    files = shared_files()
    rows = campaign(options.kinds, options.ranks, options.repeat, options.seed)
    leaks: dict[str, Any] = defaultdict(list)
    if options.rounds:
        for rank, left in enumerate(run_ranks(rounds, 2, options.rounds, timeout=300)):
            leaks |= {f"rank {rank}, {kind}": names for kind, names in left.items()}
        print(f"{options.rounds} create-and-destroy rounds: {dict(leaks) or 'nothing left behind'}")
    if more := shared_files() - files:
        leaks["/dev/shm"] = sorted(more)
    bad = sum(len(row["complaints"]) for row in rows) + len(leaks)
    result = {
        "machine": machine.describe(),
        "seed": options.seed,
        "group_timeout_seconds": GROUP_TIMEOUT,
        "rows": rows,
        "rounds": options.rounds,
        "left_behind": dict(leaks),
        "verdict": "PASS" if bad == 0 else "MISS",
    }
    print(output.write("faults", result, options.json), result["verdict"])
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
