"""What ``import dtcomm`` adds to ``import torch``: python -m bench.import_time [--quick] [--json FILE].

Every repetition is a fresh interpreter; the two sides take turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

from bench.common import machine, output
from bench.common.native import ROOT
from bench.common.stats import Timing

MOST_SECONDS = 0.3
PROGRAM = """
import time
start = time.perf_counter()
import torch
between = time.perf_counter()
import dtcomm
print(between - start, time.perf_counter() - between)
"""


def measure(repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds of ``import torch`` and of the ``import dtcomm`` after it, per fresh interpreter."""
    pairs = []
    for _ in range(repetitions + 1):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
        )
        pairs.append([float(word) for word in done.stdout.split()])
    torch_seconds, ours = zip(*pairs[1:], strict=True)  # the first run reads the files from disk
    return list(torch_seconds), list(ours)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measures, prints, writes the file; returns what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="where to write instead of bench/results/import_time.json")
    options = parser.parse_args(arguments)
    torch_seconds, ours = (Timing.of(series) for series in measure(3 if options.quick else 9))
    verdict = "PASS" if ours.median < MOST_SECONDS else "MISS"
    print(
        f"import dtcomm adds {ours.median:.3f} s to the {torch_seconds.median:.2f} s of import torch: "
        f"{verdict} (target: under {MOST_SECONDS} s)"
    )
    result = {
        "machine": machine.describe(),
        "load": machine.load(),
        "torch": torch_seconds.as_dict(),
        "dtcomm": ours.as_dict(),
        "verdict": verdict,
    }
    print(output.write("import_time", result, options.json))
    return result


if __name__ == "__main__":
    main()
