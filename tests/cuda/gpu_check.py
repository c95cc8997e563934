"""Runs everything that needs a GPU: python -m tests.cuda.gpu_check [--out DIR] [--seconds 450] [pytest options].

`make gpu-check` runs it once `_cuda` is built. Every step has a time limit, and `--seconds` limits all together. A step
that is cut off, skipped or impossible on this machine counts as failed. A summary of all steps is printed last, and
the output of each step is kept in DIR.

`make gpu-visit` runs tests and benchmarks in one list, the most valuable first, with `--visit FILE`. Outcomes are
written to FILE after each step, and tests that have passed to passed.txt beside it. A repeated command goes on with the
steps that have not run, then repeats those that did not pass without the tests that did, so a machine that ends each
command after some minutes is used in several commands. Remove both files when the code has changed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from dtcomm.system import write_file

HERE = Path(__file__).parent
# Thousands of small tests, most of their time on the CPU: several processes at once where pytest-xdist is found.
FUSED = ("test_fused.py",)
KERNELS = ("test_device.py",)
WORKERS = 12
INFERENCE = HERE / "test_inference.py"
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


def benchmarks(out: Path) -> list[Step]:
    """The benchmarks, the most important first. Each limits its own time and writes its result as it comes."""

    def limit(name: str, seconds: int) -> list[str]:
        return ["--seconds", str(seconds), "--json", str(out / f"{name}.json")]

    programs = [
        ("fused", "bench.gpu", ["--parts", "fused", "processes", *limit("gpu_fused", 60)], 90),
        ("codecs", "bench.gpu", ["--parts", "kernels", *limit("gpu_kernels", 60)], 90),
    ]
    if importlib.util.find_spec("bench.threads") is not None:
        programs.append(("threads", "bench.threads", ["--json", str(out / "threads.json")], 240))
    return [
        Step(f"bench-{name}", [sys.executable, "-m", module, *arguments], seconds)
        for name, module, arguments, seconds in programs
    ]


def visit(options: Sequence[str], out: Path, passed: Path) -> list[Step]:
    """Tests and benchmarks: what shows that the kernels are right, what they take, then the sanitizers."""
    device, communication, inference, fused, kernels, *sanitizers = steps(options, passed)
    bench_fused, codecs, *others = benchmarks(out)
    return [device, communication, inference, bench_fused, fused, codecs, *sanitizers, kernels, *others]


def remaining(chosen: Sequence[Step], outcomes: Mapping[str, str]) -> list[Step]:
    """The steps that have not passed: first those that have not run, then the others, each in order."""
    unfinished = [step for step in chosen if outcomes.get(step.name) != "passed"]
    return sorted(unfinished, key=lambda step: not outcomes.get(step.name, "NOT RUN").startswith("NOT RUN"))


def steps(options: Sequence[str], passed: Path | None = None) -> list[Step]:
    """The tests, the most important first; those in the file ``passed`` are left out, except under the sanitizers."""
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-q", *options]
    pytest += ["-p", "tests.cuda.print_failures"]
    fused, kernels = ([str(HERE / name) for name in names] for names in (FUSED, KERNELS))
    side_by_side = importlib.util.find_spec("xdist") is not None
    cores = os.cpu_count() or 1
    workers = ["-n", str(max(1, min(WORKERS, cores * 3 // 4)))] if side_by_side else []
    # Each of these tests starts two ranks.
    processes = ["-n", str(max(1, min(WORKERS // 2, cores * 3 // 8)))] if side_by_side else []
    sanitizer = shutil.which("compute-sanitizer") or next(filter(os.path.exists, SANITIZERS), None)
    sized = [*pytest, "-k", "sanitizer_sized", "-o", "timeout=0", str(HERE)]
    if passed is not None:
        pytest += ["-p", "tests.cuda.skip_passed", "--passed", str(passed)]
    return [
        Step("device", [sys.executable, "-m", "tests.cuda.gpu_check", "--about"], 90),
        Step(
            "communication",
            [
                *pytest,
                "--durations",
                "8",
                *processes,
                *(f"--ignore={name}" for name in (*fused, *kernels, INFERENCE)),
                str(HERE),
            ],
            200,
        ),
        Step("inference", [*pytest, "--durations", "4", str(INFERENCE)], 120),
        Step("fused", [*pytest, "--durations", "4", *workers, *fused], 180),
        Step("kernels", [*pytest, "--durations", "4", *workers, *kernels], 250),
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
    parser.add_argument("--visit", type=Path, metavar="FILE", help="benchmarks too; go on where FILE says")
    ours, options = parser.parse_known_args()
    if ours.about:
        about()
        return 0
    ours.out.mkdir(parents=True, exist_ok=True)
    available = visit(options, ours.out, passed_beside(ours.visit)) if ours.visit else steps(options)
    chosen = [step for step in available if not ours.only or step.name in ours.only]
    if not chosen:
        parser.error(f"--only: expected some of {[step.name for step in available]}, got {ours.only}")
    return run_all(chosen, ours.seconds, ours.out, ours.visit)


def passed_beside(state: Path) -> Path:
    """The file with the names of the tests that have passed."""
    return state.with_name("passed.txt")


def run_all(chosen: Sequence[Step], seconds: float, out: Path, state: Path | None = None) -> int:
    """Run the steps, or those that ``state`` does not call passed; returns 0 if all have passed."""
    outcomes: dict[str, str] = {}
    if state is not None and state.exists():
        outcomes = json.loads(state.read_text())
    end = time.monotonic() + seconds
    taken: dict[str, float] = {}
    for step in remaining(chosen, outcomes):
        begin = time.monotonic()
        print(f"--- {step.name}", flush=True)
        outcome = run(step, end - begin, out / f"{step.name}.log")
        # A step that no time was left for keeps the outcome of its last run.
        if not (outcome.startswith("NOT RUN") and step.name in outcomes):
            outcomes[step.name] = outcome
        taken[step.name] = time.monotonic() - begin
        for file in () if state is None else (state, out / state.name):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, json.dumps(outcomes, indent=1) + "\n")
        if state is not None and passed_beside(state).exists():
            write_file(out / passed_beside(state).name, passed_beside(state).read_text())
        if step.name == "device" and outcome != "passed":
            outcomes |= {left.name: "NOT RUN: no device" for left in chosen if left.name not in outcomes}
            break
    print("--- summary")
    for step in chosen:
        duration = f"{taken[step.name]:>6.1f} s" if step.name in taken else "  before"
        print(f"{step.name:<14} {duration}  {outcomes[step.name]}")
    return 0 if all(outcomes[step.name] == "passed" for step in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
