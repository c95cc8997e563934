"""torch's own tests of torch.distributed on backend "dtcomm", and those that fail, or all, on Gloo.

python -m tests.stress.torch_suite [--world-size 2 3 4] [-k PATTERN ...] [--without TEST ...]
[--share I N] [--peer-on failures|all] [--json FILE]

The tests are those of the installed torch: collectives, point-to-point messages, groups, objects, DDP and its hooks. A
test that passes on the peer and fails on the backend is a fault, unless `EXPECTED` says why it cannot pass. It writes
build/stress/torch_suite.json. The exit status is 1 if there is a fault, or if a test of `EXPECTED` passes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from bench.common import report
from dtcomm.launch import fork_server
from dtcomm.launch.ranks import run_ranks, spawn_ranks
from tests.stress import DETAILS
from tests.stress.torch_suite_rank import environment, list_tests, make_folders, run_tests

LIMIT_SECONDS = 300.0  # of one test; groups time out after 60
GRACE_SECONDS = 3.0  # for the other ranks once one has failed

# Tests of what is particular to Gloo: name of the test → why it cannot pass on this backend.
_PROFILED = "torch's profiler shows the operations of torch's own backends under the name of the backend"
EXPECTED: dict[str, str] = {
    "test_barrier_timeout_arg": "it is the first call of its group, which makes a communicator within the group's "
    "timeout of 300 s, not within the call's, and it expects Gloo's words",
    "test_ddp_profiling_autograd_profiler": _PROFILED,
    "test_ddp_profiling_torch_profiler": _PROFILED,
}


def attempt(test: str, world_size: int, backend: str) -> dict[str, Any]:
    """Run a test in new processes; return the verdict, ``passed``, ``failed`` or ``skipped``, with the reason."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make_folders(Path(folder), [test])
        variables = environment(world_size, folder)
        with spawn_ranks(
            run_tests, world_size, backend, [test], folder, backend=None, fresh=True, env=variables
        ) as ranks:
            outcomes = ranks.join(LIMIT_SECONDS, grace=GRACE_SECONDS)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    # Ranks that were ended because another one failed say nothing about why.
    failed = [outcome for outcome in failed if not outcome.timed_out] or failed
    verdict, reason = "passed", ""
    if failed:
        verdict, reason = "failed", "; ".join(outcome.describe_failure() for outcome in failed)
    elif outcomes[0].result:
        verdict, reason = "skipped", outcomes[0].result[test]
    seconds = round(time.monotonic() - started, 1)
    return {"verdict": verdict, "reason": reason, "seconds": seconds}


def judge(rows: list[dict[str, Any]], expected: dict[str, str], peer: str) -> list[str]:
    """Return the faults, each as a sentence.

    Args:
        rows: What `compare` returned.
        expected: Tests that cannot pass on the backend, and why.
        peer: The name of the other backend; empty: every failure is a fault.
    """
    faults, excused, ran = [], set(), set()
    for row in rows:
        if row["verdict"] != "skipped":
            ran.add(row["test"])
        if row["verdict"] != "failed" or (peer and row[peer]["verdict"] != "passed"):
            continue
        if row["test"] in expected:
            excused.add(row["test"])
        else:
            faults.append(f"{row['test']} on {row['ranks']} ranks: {row['reason']}")
    passing = [test for test in expected if test in ran and test not in excused]
    return faults + [
        f"{test} is listed as one that cannot pass ({expected[test]}), and passes" for test in passing
    ]


def compare(test: str, world_size: int, backend: str, peer: str, *, always: bool = False) -> dict[str, Any]:
    """Run a test on the backend and, if it fails there or ``always`` unless it is skipped, on its peer."""
    row = {"test": test, "ranks": world_size, **attempt(test, world_size, backend)}
    if peer and (row["verdict"] == "failed" or (always and row["verdict"] == "passed")):
        row[peer] = attempt(test, world_size, peer)
    return row


def progress(done: int, total: int, text: str) -> None:
    """Show how far the program is, where stderr is a terminal."""
    if sys.stderr.isatty():
        filled = 30 * done // max(total, 1)
        bar = "#" * filled + "." * (30 - filled)
        print(f"\r[{bar}] {done}/{total} {text:70.70}", end="", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the tests, print a line for each, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks")
    parser.add_argument(
        "-k", dest="patterns", nargs="+", default=[""], help="only tests with one of these in the name"
    )
    parser.add_argument("--without", nargs="+", default=[], help="names of tests to leave out")
    parser.add_argument("--backend", default="dtcomm", help="what is tested")
    parser.add_argument("--peer", default="gloo", help="what failed tests are run on too; '': nothing")
    parser.add_argument(
        "--share", type=int, nargs=2, default=[1, 1], metavar=("I", "N"), help="only the I-th of N shares"
    )
    parser.add_argument(
        "--peer-on", choices=("failures", "all"), default="failures", help="which tests the peer runs too"
    )
    parser.add_argument("--json", help="where to write instead of build/stress/torch_suite.json")
    options = parser.parse_args(arguments)
    fork_server.MODULES.append("tests.stress.torch_suite_module")
    rows: list[dict[str, Any]] = []
    for world_size in options.world_size:
        os.environ.update(environment(world_size))  # for the process from which ranks are forked
        (tests,) = run_ranks(list_tests, 1, backend=None, fresh=True)
        chosen = [test for test in tests if any(pattern in test for pattern in options.patterns)]
        chosen = [test for test in chosen if test not in options.without]
        share, shares = options.share
        chosen = chosen[share - 1 :: shares]
        for number, test in enumerate(chosen):
            progress(number, len(chosen), f"{world_size} ranks: {test}")
            row = compare(test, world_size, options.backend, options.peer, always=options.peer_on == "all")
            rows.append(row)
            verdicts = [f"{options.backend} {row['verdict']}"]
            verdicts += [f"{options.peer} {row[options.peer]['verdict']}"] if options.peer in row else []
            reason = f" ({row['reason'].splitlines()[0]})" if row["reason"] else ""
            progress(number + 1, len(chosen), "")
            print(f"{world_size} ranks, {test}: {', '.join(verdicts)}{reason}", flush=True)
    counts = {
        str(world_size): Counter(row["verdict"] for row in rows if row["ranks"] == world_size)
        for world_size in options.world_size
    }
    faults = judge(rows, EXPECTED, options.peer)
    for fault in faults:
        print(f"FAULT: {fault}")
    for world_size, count in counts.items():
        print(
            f"{world_size} ranks: {', '.join(f'{number} {verdict}' for verdict, number in sorted(count.items()))}"
        )
    result = {
        "torch": torch.__version__,
        "counts": counts,
        "faults": faults,
        "expected": EXPECTED,
        "rows": rows,
        "verdict": "MISS" if faults else "PASS",
    }
    print(
        report.write(options.json or DETAILS / "torch_suite.json", result),
        result["verdict"],
    )
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
