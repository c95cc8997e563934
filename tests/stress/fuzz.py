"""Give random and damaged payloads of every codec to all kernels, under AddressSanitizer and UBSan.

python -m tests.stress.fuzz [--payloads 10000000] [--seed 1] [--jobs 2] [--json FILE]

`make fuzzer` builds csrc/tests/fuzz_payloads.cpp with both sanitizers. So many processes as --jobs run at once, each on
its share of the payloads and with a seed of its own, from --seed on. Every kernel must give the bytes of the generic
one, touch nothing outside its buffers and do nothing undefined; damaged payloads may decode to anything or be rejected.
The exit status is 1 if a process found a fault.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from typing import Any

from bench.common import report
from tests.stress import DETAILS

FUZZER = report.ROOT / "build" / "fuzz" / "fuzz_payloads_test"
_TOTAL = re.compile(
    r"(?P<payloads>\d+) payloads, (?P<combinations>\d+) combinations, (?P<kernels>\d+) kernels"
)
_FAMILY = re.compile(r"^ +(?P<name>\w+) +(?P<payloads>\d+) decoded, (?P<rejected>\d+) rejected", re.MULTILINE)


def parse_output(text: str) -> dict[str, Any]:
    """Return the counts that the fuzzer printed: in all, and by family of codecs.

    Raises:
        ValueError: It printed none.
    """
    total = _TOTAL.search(text)
    if total is None:
        raise ValueError(f"fuzz_payloads_test: no counts in its output: {text[-500:]!r}")
    families = {
        found["name"]: {"payloads": int(found["payloads"]), "rejected": int(found["rejected"])}
        for found in _FAMILY.finditer(text)
    }
    return {**{name: int(value) for name, value in total.groupdict().items()}, "families": families}


def start(seed: int, payloads: int) -> subprocess.Popen[str]:
    """Start one process of the fuzzer."""
    return subprocess.Popen(
        [FUZZER, "--payloads", str(payloads), "--seed", str(seed)],
        env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Build, run, print, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--payloads", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first process")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--json", help="where to write instead of build/stress/fuzz.json")
    options = parser.parse_args(arguments)
    subprocess.run(["make", "-s", "fuzzer"], cwd=report.ROOT, check=True, stdout=subprocess.DEVNULL)
    started = time.monotonic()
    share = -(-options.payloads // options.jobs)
    processes = {seed: start(seed, share) for seed in range(options.seed, options.seed + options.jobs)}
    runs, failures = [], []
    for seed, process in processes.items():
        text, _ = process.communicate()
        if process.returncode != 0:
            failures.append(f"seed {seed} ended with status {process.returncode}: {text[-3000:]}")
            continue
        runs.append({"seed": seed, **parse_output(text)})
    families: dict[str, dict[str, int]] = {}
    for run in runs:
        for name, counts in run["families"].items():
            sums = families.setdefault(name, {"payloads": 0, "rejected": 0})
            for key, count in counts.items():
                sums[key] += count
    lossless = families.get("lossless", {"payloads": 0})["payloads"]
    result = {
        "seconds": round(time.monotonic() - started, 1),
        "seeds": list(processes),
        "payloads": sum(run["payloads"] for run in runs),
        "rejected": sum(counts["rejected"] for name, counts in families.items() if name != "lossless"),
        "combinations": sum(run["combinations"] for run in runs),
        "lossless payloads": lossless,
        "kernels": max((run["kernels"] for run in runs), default=0),
        "families": families,
        "failures": failures,
        "verdict": "MISS" if failures else "PASS",
    }
    print("\n".join(failures) or f"{result['payloads']:,} payloads in {result['seconds']} s, no fault")
    print(report.write(options.json or DETAILS / "fuzz.json", result), result["verdict"])
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
