"""Run torch's own distributed tests on Gloo and on the dtcomm backend, and compare the outcomes.

    python -m bench.torch_distributed                 # all tests, one line each; --only PATTERN for some
    python -m bench.torch_distributed --json          # also writes bench/results/torch_distributed.json

The tests are ``torch.testing._internal.distributed.distributed_test`` on 3 ranks. torch decides by the backend's name
which tests apply. To run all that apply to Gloo, the tests see the name Gloo, and every group they create is one of the
dtcomm backend (``--serve`` is the process that does so). A test that passes on Gloo and not on dtcomm is a difference;
``EXPECTED`` lists those that cannot pass, with the reason. The exit status is 1 for any other difference.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import output
from bench.common.machine import describe

RESULT = Path(__file__).parent / "results" / "torch_distributed.json"
BACKENDS = ("gloo", "dtcomm")
RANKS = 3

# Tests that Gloo passes and this backend cannot, and why.
EXPECTED: dict[str, str] = {
    "test_get_backend": "the test compares the backend's name, which is dtcomm",
}


def main(argv: list[str] | None = None) -> int:
    """Run the tests on both backends and print where they differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.torch_distributed", description=__doc__)
    parser.add_argument("--only", default="*", help="patterns of names, as in a shell, separated by commas")
    parser.add_argument("--again", action="store_true", help=f"read Gloo's outcomes from {RESULT.name}")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="which to run")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--json", action="store_true", help=f"write {RESULT}")
    parser.add_argument("--serve", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the errors of failed tests")
    args = parser.parse_args(argv)
    if args.serve:
        return serve(args.serve, args.only)
    chosen = args.backends.split(",")
    outcomes: dict[str, dict[str, dict[str, Any]]] = {}
    if args.again:
        earlier = json.loads(RESULT.read_text(encoding="utf-8"))["tests"]
        for test, recorded in earlier.items():
            if any(fnmatch.fnmatch(test, pattern) for pattern in args.only.split(",")):
                outcomes[test] = {
                    "gloo": {"test": test, "outcome": recorded["gloo"], "seconds": 0.0, "said": ""}
                }
    for backend in chosen:
        only = args.only
        if backend != "gloo" and outcomes:  # only tests that pass on Gloo are compared
            only = ",".join(
                test for test, result in outcomes.items() if result["gloo"]["outcome"] == "passes"
            )
        if backend == "gloo" and args.again:
            continue
        for result in run(backend, only, args.timeout):
            outcomes.setdefault(result["test"], {})[backend] = result
            print(f"{backend:8}{result['outcome']:8}{result['seconds']:6.1f} s  {result['test']}", flush=True)
            if args.verbose and result["outcome"] == "fails":
                print(result["said"], flush=True)
    return conclude(outcomes, chosen, args.json)


def run(backend: str, only: str, timeout: float) -> Iterator[dict[str, Any]]:
    """Yield each test's outcome; the tests run in one process, `serve`."""
    command = [sys.executable, "-m", "bench.torch_distributed", "--serve", backend, "--only", only]
    env = os.environ | {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(timeout)),
        "TEMP_DIR": "",
    }
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)


def serve(backend: str, only: str) -> int:
    """Run the tests in this process; print a line of JSON for each."""
    import unittest

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test as shipped

    if backend == "dtcomm":
        _stand_in(shipped)
    fork: Any = torch.multiprocessing.get_context("fork").Process

    class Shipped(shipped.TestDistBackend, shipped.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(fork)

    assert dist.is_available()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # tests print to standard output as well
    for name in unittest.TestLoader().getTestCaseNames(Shipped):
        if not any(fnmatch.fnmatch(name, pattern) for pattern in only.split(",")):
            continue
        result = unittest.TestResult()
        start = time.perf_counter()
        unittest.TestSuite([Shipped(name)]).run(result)
        errors = [text for _, text in (*result.errors, *result.failures)]
        outcome = "fails" if errors else "skips" if result.skipped else "passes"
        record = {
            "test": name,
            "outcome": outcome,
            "seconds": round(time.perf_counter() - start, 2),
            "said": "\n".join(errors)[-6000:] or "; ".join(reason for _, reason in result.skipped),
        }
        print(json.dumps(record), file=out, flush=True)
    return 0


def _stand_in(shipped: Any) -> None:
    """Make the tests create groups of the backend dtcomm instead of Gloo, and accept the names of its events."""
    import functools

    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    import dtcomm  # noqa: F401

    def instead(name: str) -> None:
        original = getattr(c10d, name)

        @functools.wraps(original)
        def with_dtcomm(*args: Any, **kwargs: Any) -> Any:
            if name == "init_process_group" and args and args[0] == "gloo":
                args = ("dtcomm", *args[1:])
            if kwargs.get("backend") == "gloo":
                kwargs["backend"] = "dtcomm"
            return original(*args, **kwargs)

        setattr(c10d, name, with_dtcomm)
        setattr(dist, name, with_dtcomm)

    for name in ("init_process_group", "new_group"):
        instead(name)
    events = shipped.get_profiling_event

    def get_profiling_event(event_name: str, *args: Any, **kwargs: Any) -> Any:
        return events(event_name.replace("gloo:", "dtcomm:"), *args, **kwargs)

    shipped.get_profiling_event = get_profiling_event


def conclude(outcomes: dict[str, dict[str, dict[str, Any]]], chosen: list[str], write: bool) -> int:
    """Print the totals and the differences; return the exit status."""
    for backend in chosen:
        counts = Counter(results[backend]["outcome"] for results in outcomes.values() if backend in results)
        seconds = sum(results[backend]["seconds"] for results in outcomes.values() if backend in results)
        summary = ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items()))
        print(f"{backend}: {summary} ({seconds:.0f} s)")
    if len(chosen) < 2:
        return 0
    differences = {
        test: {backend: results.get(backend, {"outcome": "did not run", "said": ""}) for backend in chosen}
        for test, results in outcomes.items()
        if results.get("gloo", {}).get("outcome") == "passes"
        and results.get("dtcomm", {}).get("outcome") != "passes"
    }
    unexpected = 0
    for test, results in differences.items():
        known = EXPECTED.get(test, "")
        unexpected += not known
        print(
            f"{test}: Gloo {results['gloo']['outcome']}, dtcomm {results['dtcomm']['outcome']}"
            + (f" ({known})" if known else "")
        )
    passed = sum(results.get("gloo", {}).get("outcome") == "passes" for results in outcomes.values())
    print(
        f"of {passed} tests that Gloo passes dtcomm fails {unexpected}, and {len(EXPECTED)} that it cannot pass"
    )
    if write:
        record = {
            "machine": describe(),
            "ranks": RANKS,
            "tests": {
                test: {backend: results.get(backend, {}).get("outcome") for backend in chosen}
                for test, results in sorted(outcomes.items())
            },
            "differences": {
                test: {
                    "outcomes": {backend: result["outcome"] for backend, result in results.items()},
                    "expected": EXPECTED.get(test, ""),
                }
                for test, results in differences.items()
            },
        }
        RESULT.write_text(output.format_json(output.summary(record)), encoding="utf-8")
        print(f"written to {RESULT}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    raise SystemExit(main())
