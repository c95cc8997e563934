"""Seeded interleavings of the rendezvous: ranks as threads, of which one at a time does one operation of the store.

python -m tests.stress.rendezvous [--seeds 100000] [--first 0] [--json FILE]

Each seed is a scenario: 2 to 4 ranks, one to three groups in any order, ranks that raise, die, restart, come late, are
not scheduled, call again after an error or although others do not, and stores that fail. All ranks of a group must meet
in the same attempt or all raise, errors must name the rank at fault, calls must end at their deadline, ranks that call
again must meet, and no keys may be left in the store. It writes build/stress/rendezvous.json. A seed that fails prints
every operation of the store. The exit status is 1 then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

from bench.common import report as results
from tests.stress import DETAILS
from tests.support.rendezvous_scenarios import Run, report

_MOST_REPORTS = 3  # of seeds that fail


def run_seeds(first: int, count: int) -> dict[str, Any]:
    """Run the scenarios of some seeds; return how often what happened, and the seeds that failed."""
    outcomes: Counter[str] = Counter()
    wrong: dict[int, list[str]] = {}
    steps = 0
    for seed in range(first, first + count):
        run = Run(seed)
        sentences = run.run()
        if sentences:
            wrong[seed] = sentences
        steps += run.scheduler.steps
        outcomes.update(
            type(call.error).__name__ if call.error else "made" for call in run.calls if call.ended
        )
        if sys.stderr.isatty() and seed % 200 == 0:
            done = seed - first
            print(f"\r{done}/{count} seeds, {len(wrong)} failed", end="", file=sys.stderr, flush=True)
    return {"seeds": count, "first": first, "steps": steps, "calls": dict(outcomes), "wrong": wrong}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the seeds, print, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--json", help="where to write instead of build/stress/rendezvous.json")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    found = run_seeds(options.first, options.seeds)
    for seed in list(found["wrong"])[:_MOST_REPORTS]:
        print(report(seed))
    print(
        f"{options.seeds} seeds, {found['steps']} steps: {found['calls']}; {len(found['wrong'])} seeds failed"
    )
    result = {
        "seconds": round(time.monotonic() - started, 1),
        **found,
        "wrong": [{"seed": seed, "what": sentences} for seed, sentences in found["wrong"].items()],
        "verdict": "MISS" if found["wrong"] else "PASS",
    }
    print(
        results.write(options.json or DETAILS / "rendezvous.json", result),
        result["verdict"],
    )
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
