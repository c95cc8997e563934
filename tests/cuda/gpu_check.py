"""Runs everything that needs a GPU: python -m tests.cuda.gpu_check [--out DIR] [--seconds 450] [pytest options].

`make gpu-check` runs it once `_cuda` is built. Every step has a time limit, and `--seconds` limits all together. A step
that is cut off, skipped or impossible on this machine counts as failed. A summary of all steps is printed last, and
the output of each step is kept in DIR.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

HERE = Path(__file__).parent
# Thousands of small tests, much of it on the CPU, and kernels that Triton compiles: several processes at once where
# pytest-xdist is found.
KERNELS = ("test_device.py", "test_triton.py", "test_fused.py", "test_programs.py")
WORKERS = 12
SANITIZERS = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")
# Torch makes API calls that some drivers do not support, so only errors in kernels count; tests check API errors.
SANITIZER_OPTIONS = ("--report-api-errors", "no", "--error-exitcode", "99")


class Step(NamedTuple):
    """A command and its time limit; ``missing`` is the reason when its tool was not found."""

    name: str
    command: Sequence[str]
    seconds: float
    missing: str = ""
    environment: tuple[tuple[str, str], ...] = ()


def about() -> None:
    """Print the devices and versions; exit with an error unless both torch and `_cuda` see a device."""
    import torch

    from dtcomm import _cuda

    platform = _cuda.platform()
    if not torch.cuda.is_available() or not platform["devices"]:
        sys.exit(f"torch sees {torch.cuda.device_count()} CUDA devices, _cuda none: {platform['error']}")
    names = [device["name"] for device in platform["devices"]]
    print(
        f"{', '.join(names)}; driver {platform['driver']}, runtime {platform['runtime']}; torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}; Python {sys.version.split()[0]}, {os.cpu_count()} cores"
    )


def steps(options: Sequence[str]) -> list[Step]:
    """The steps, the most important first."""
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-q", *options]
    kernels = [str(HERE / name) for name in KERNELS]
    side_by_side = importlib.util.find_spec("xdist") is not None
    workers = ["-n", str(max(1, min(WORKERS, (os.cpu_count() or 1) * 3 // 4)))] if side_by_side else []
    sanitizer = shutil.which("compute-sanitizer") or next(filter(os.path.exists, SANITIZERS), None)
    sized = [*pytest, "-k", "sanitizer_sized", "-o", "timeout=0", str(HERE)]
    return [
        Step("device", [sys.executable, "-m", "tests.cuda.gpu_check", "--about"], 90),
        Step(
            "communication",
            [*pytest, "--durations", "8", *(f"--ignore={name}" for name in kernels), str(HERE)],
            200,
        ),
        Step("kernels", [*pytest, "--durations", "4", *workers, *kernels], 180),
        *(
            Step(
                tool,
                [sanitizer or "", "--tool", tool, *SANITIZER_OPTIONS, *sized],
                100,
                missing=""
                if sanitizer
                else "compute-sanitizer was not found; it comes with the CUDA toolkit",
                environment={
                    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
                },  # else spare memory in torch's pool hides an overrun
            )
            for tool in ("memcheck", "racecheck")
        ),
    ]


def run(step: Step, seconds: float, log: Path) -> str:
    """Run a step and return "passed", or the reason why it did not pass."""
    if step.missing:
        return f"NOT RUN: {step.missing}"
    limit = min(step.seconds, seconds)
    if limit < 5:
        return "NOT RUN: no time was left"
    with log.open("w") as file:
        process = subprocess.Popen(
            step.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | dict(step.environment) | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=copy, args=(process.stdout, (sys.stdout, file)), daemon=True)
        reader.start()
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"CUT OFF after {limit:.0f} s"
        finally:
            reader.join(5)
    return "passed" if status == 0 else f"FAILED with status {status}"


def copy(source: TextIO, sinks: Sequence[TextIO]) -> None:
    for line in source:
        for sink in sinks:
            sink.write(line)
            sink.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--about", action="store_true", help="only say what device and versions there are")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="where each step's output goes")
    parser.add_argument("--seconds", type=float, default=450, help="of all steps together")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="device, communication, kernels, ...")
    ours, options = parser.parse_known_args()
    if ours.about:
        about()
        return 0
    ours.out.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in steps(options) if not ours.only or step.name in ours.only]
    if not chosen:
        parser.error(f"--only: expected some of {[step.name for step in steps(())]}, got {ours.only}")
    end = time.monotonic() + ours.seconds
    outcomes = []
    for step in chosen:
        begin = time.monotonic()
        print(f"--- {step.name}", flush=True)
        outcome = run(step, end - begin, ours.out / f"{step.name}.log")
        outcomes.append((step.name, outcome, time.monotonic() - begin))
        if step.name == "device" and outcome != "passed":
            outcomes += [(left.name, "NOT RUN: no device", 0.0) for left in chosen[1:]]
            break
    print("--- summary")
    for name, outcome, seconds in outcomes:
        print(f"{name:<14} {seconds:>6.1f} s  {outcome}")
    return 0 if all(outcome == "passed" for _, outcome, _ in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
