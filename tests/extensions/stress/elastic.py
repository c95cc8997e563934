"""Kill ranks of `dtcomm.extensions.elastic` at random moments, and start others that join, while the rest train on.

python -m tests.extensions.stress.elastic [--minutes 30] [--ranks 3] [--pause 1 4] [--method diloco|streaming]

The first rank is never killed: it says whether training goes on, and whether memory, descriptors or threads grow. Of
the others one is killed (SIGKILL), or leaves (SIGTERM), a pause after all take part, also while it joins, and another
one starts.
The common weights of all ranks must be equal after each average, the loss must halve, and no average may take longer
than the timeout for silent ranks and 30 seconds more. The exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import report
from dtcomm.extensions.elastic import Coordinator
from tests.extensions.stress.elastic_rank import OPTIONS
from tests.stress import DETAILS
from tests.stress.soak import MOST_GROWTH, left_behind
from tests.stress.soak_rank import resource_usage

TIMEOUT = 20.0
ALLOWED_PAUSE = TIMEOUT + 30.0
JOIN_SECONDS = 240.0  # for a process to start, import torch and join, also on a busy machine
MAX_FINAL_LOSS = 0.5  # as a share of the loss in the beginning
SETTLED = 0.25  # share of the averages after which memory is compared


class Ranks:
    """The processes of the ranks.

    Args:
        folder: Where they write their logs.
        address: The coordinator's.
        method: One of `OPTIONS`.
    """

    def __init__(self, folder: Path, address: str, method: str) -> None:
        self._folder, self._arguments = folder, (address, method)
        self.running: list[subprocess.Popen[bytes]] = []
        self.pids: list[int] = []

    def start(self) -> None:
        """Start one more."""
        address, method = self._arguments
        path = self._folder / f"rank{len(self.pids):04d}.jsonl"
        line = f"-m tests.extensions.stress.elastic_rank {address} {path} {method} {TIMEOUT}"
        command = [sys.executable, *line.split()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with open(self._folder / "errors", "ab") as errors:
            process = subprocess.Popen(command, stdout=errors, stderr=errors, env=environment)
        self.running.append(process)
        self.pids.append(process.pid)

    def end(self, index: int, sig: signal.Signals) -> None:
        """End one, by its position among those that run."""
        process = self.running.pop(index)
        process.send_signal(sig)
        try:
            process.wait(ALLOWED_PAUSE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ended(self) -> list[int]:
        """Return the exit codes of those that ended by themselves."""
        codes = [process.poll() for process in self.running]
        return [code for code in codes if code is not None]


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines that each rank logged, by its name."""
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        for path in sorted(folder.glob("*.jsonl"))
    }


def wait_for_members(coordinator: Coordinator, count: int) -> float | None:
    """Return after how many seconds so many ranks take part; None: they did not within `JOIN_SECONDS`."""
    start = time.monotonic()
    while len(coordinator.members()) != count:
        if time.monotonic() > start + JOIN_SECONDS:
            return None
        time.sleep(0.05)
    return time.monotonic() - start


def resources(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the least use of each resource at the start, in the second quarter of the averages, and in the last one.

    What is not given back raises the least use too. The most use is that of a moment in which the group changes, when
    parts of two groups exist.
    """
    quarter = max(1, int(len(lines) * SETTLED))
    parts = {"start": lines[quarter : 2 * quarter], "end": lines[-quarter:]}
    return {
        when: {name: min(line[name] for line in part) for name in MOST_GROWTH} for when, part in parts.items()
    }


def growth(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return how much each resource grew."""
    used = resources(lines)
    return {name: used["end"][name] - used["start"][name] for name in MOST_GROWTH}


def complaints(logs: dict[str, list[dict[str, Any]]], codes: list[int]) -> list[str]:
    """Return descriptions of what is wrong."""
    bad = [f"a rank ended with {code}" for code in codes]
    first = next(iter(logs.values()), [])
    if len(first) < 8:
        return [*bad, f"the first rank made {len(first)} averages"]
    pauses = [after["at"] - before["at"] for before, after in itertools.pairwise(first)]
    if max(pauses) > ALLOWED_PAUSE:
        bad.append(f"an average took {max(pauses):.1f} s")
    # The loss falls in the first hundreds of averages, and then stays where the noise of the batches keeps it.
    early, late = (
        statistics.mean(line["loss"] for line in part) for part in (first[:8], first[-len(first) // 8 :])
    )
    if not late < MAX_FINAL_LOSS * early:
        bad.append(f"the loss was {early:.4f} and became {late:.4f}, more than {MAX_FINAL_LOSS:g} of that")
    bad += [f"{name} grew by {grown:g}" for name, grown in growth(first).items() if grown > MOST_GROWTH[name]]
    digests: dict[tuple[int, int], set[int]] = {}
    for lines in logs.values():
        for line in lines:
            digests.setdefault((line["view"], line["step"]), set()).add(line["digest"])
    if unequal := [key for key, found in digests.items() if len(found) > 1]:
        bad.append(f"common weights differ at (view, step) {unequal[:5]}")
    if sum(len(lines) > 0 for lines in logs.values()) < 3:
        bad.append("fewer than three ranks have taken part")
    return bad


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument(
        "--pause", type=float, nargs=2, default=[1.0, 4.0], help="least and most seconds between kills"
    )
    parser.add_argument("--method", choices=sorted(OPTIONS), default="diloco")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="where to write instead of build/stress/elastic.json")
    options = parser.parse_args(arguments)
    os.environ.setdefault("DTCOMM_SECRET", "the secret of this campaign")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    chance, events = random.Random(options.seed), {"killed": 0, "left": 0, "killed while joining": 0}
    started = time.time()
    with (
        TemporaryDirectory(prefix="dtcomm-elastic-") as name,
        Coordinator("127.0.0.1", ranks=options.ranks, timeout_s=TIMEOUT) as coordinator,
    ):
        before = resource_usage()
        folder, codes = Path(name), []
        ranks = Ranks(folder, coordinator.address, options.method)
        for _ in range(options.ranks):
            ranks.start()
        waited = [wait_for_members(coordinator, options.ranks)]
        started = time.time()
        while time.time() < started + options.minutes * 60 and not codes:
            time.sleep(chance.uniform(*options.pause))
            victim = chance.randrange(1, options.ranks)
            kind = chance.choice(["killed", "killed", "left"])
            ranks.end(victim, signal.SIGKILL if kind == "killed" else signal.SIGTERM)
            events[kind] += 1
            ranks.start()
            if chance.random() < 0.2:  # the one that has just started
                time.sleep(chance.uniform(1, 4))
                ranks.end(-1, signal.SIGKILL)
                events["killed while joining"] += 1
                ranks.start()
            waited.append(wait_for_members(coordinator, options.ranks))
            codes = ranks.ended()
        after = resource_usage()
        while ranks.running:
            ranks.end(-1, signal.SIGTERM if len(ranks.running) > 1 else signal.SIGKILL)
        logs = read(folder)
        errors = (folder / "errors").read_text()
    bad = complaints(logs, codes)
    if None in waited:
        bad.append(f"a rank did not join within {JOIN_SECONDS:g} s")
    if bad:
        print(errors[-4000:])
    if remaining := left_behind(ranks.pids):
        bad.append(f"processes left behind: {remaining}")
    coordinator_growth = {key: after[key] - before[key] for key in ("descriptors", "threads", "rss_kib")}
    joins = [seconds for seconds in waited if seconds]
    first = next(iter(logs.values()), [])
    pauses = sorted(after["at"] - before["at"] for before, after in itertools.pairwise(first))
    result = {
        "method": options.method,
        "minutes": round((time.time() - started) / 60, 2),
        "ranks": options.ranks,
        "events": events,
        "processes": len(ranks.pids),
        "median_join_s": round(statistics.median(joins), 1) if joins else None,
        "longest_join_s": round(max(joins, default=0.0), 1),
        "views": first[-1]["view"] if first else 0,
        "averages": len(first),
        "failed_attempts": len(
            re.findall(r"dtcomm: average \d+ failed, and is repeated", errors)
        ),  # of all ranks
        "longest_average_s": round(pauses[-1], 2) if pauses else None,
        "p95_average_s": round(pauses[int(0.95 * len(pauses))], 3) if pauses else None,
        "losses": [round(line["loss"], 4) for line in first[:: max(1, len(first) // 16)]],
        "resources": resources(first) if len(first) >= 8 else None,
        "growth": growth(first) if len(first) >= 8 else None,
        "coordinator_growth": coordinator_growth,
        "complaints": bad,
        "verdict": "MISS" if bad else "PASS",
    }
    print(json.dumps({key: value for key, value in result.items() if key != "machine"}, indent=1))
    print(report.write(options.json or DETAILS / "elastic.json", result), result["verdict"])
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
