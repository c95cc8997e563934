"""Runs everything that needs a GPU: python -m tests.cuda.gpu_check [--out DIR] [--seconds 450] [pytest options].

What `make gpu-check` runs once `_cuda` is built. Every step has a limit and all together have `--seconds`; what is cut
off, left out or not to be had on this machine counts as failed and is named in the summary, which comes last. Output
of each step is kept in DIR.
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
# Torch asks the driver for what not every driver has, so only errors of kernels count; the tests see those of calls.
SANITIZER_OPTIONS = ("--report-api-errors", "no", "--error-exitcode", "99")


class Step(NamedTuple):
    """A command and how long it may take; ``missing`` says why there is none."""

    name: str
    command: Sequence[str]
    seconds: float
    missing: str = ""
    environment: tuple[tuple[str, str], ...] = ()


def about() -> None:
    """What was found, or why it will not do: `_cuda` is built and sees the device that torch sees."""
    import torch

    from dtcomm import _cuda

    found = _cuda.platform()
    if not torch.cuda.is_available() or not found["devices"]:
        sys.exit(f"torch sees {torch.cuda.device_count()} CUDA devices, _cuda none: {found['error']}")
    names = [device["name"] for device in found["devices"]]
    print(
        f"{', '.join(names)}; driver {found['driver']}, runtime {found['runtime']}; torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}; Python {sys.version.split()[0]}, {os.cpu_count()} cores"
    )


def steps(options: Sequence[str]) -> list[Step]:
    """In the order in which they are worth having."""
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
                },  # or what torch's pool holds hides an overrun
            )
            for tool in ("memcheck", "racecheck")
        ),
    ]


def run(step: Step, seconds: float, log: Path) -> str:
    """What came of it: "passed", or why not."""
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


def copy(given: TextIO, to: Sequence[TextIO]) -> None:
    for line in given:
        for each in to:
            each.write(line)
            each.flush()


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
    said = []
    for step in chosen:
        begin = time.monotonic()
        print(f"--- {step.name}", flush=True)
        what = run(step, end - begin, ours.out / f"{step.name}.log")
        said.append((step.name, what, time.monotonic() - begin))
        if step.name == "device" and what != "passed":
            said += [(left.name, "NOT RUN: no device", 0.0) for left in chosen[1:]]
            break
    print("--- summary")
    for name, what, took in said:
        print(f"{name:<14} {took:>6.1f} s  {what}")
    return 0 if all(what == "passed" for _, what, _ in said) else 1


if __name__ == "__main__":
    sys.exit(main())
