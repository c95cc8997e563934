"""The visit to a GPU: python -m bench.visit [--seconds 500] [--out DIR] [--steps NAME ...] [--rehearse].

`make gpu-visit` builds `_cuda` for the device that it finds and runs this. Every step decides something, the most
valuable first, in a process of its own with a limit of time. After each step DIR/visit.json says how it ended, what it
found, and what it decides; DIR/NAME.log holds its output. A step that cannot run here says why, and counts as failed.
With several GPUs the steps between processes give each its own; one GPU is shared by them.

--rehearse runs every step on the CPU: the emulator and CPU tensors that pass for CUDA tensors replace the device, and
profilers and sanitizers are left out, but not the programs that they would watch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtcomm.system import write_file

TOOLS = ("/usr/local/cuda/bin", "/opt/cuda/bin", "/opt/nvidia/nsight-compute")
# Torch makes API calls that some drivers do not support, so only errors in kernels count; tests check API errors.
SANITIZE = ("--report-api-errors", "no", "--error-exitcode", "99")
PROFILE = ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "MemoryWorkloadAnalysis")


class Step(NamedTuple):
    """A step of `bench.common.visit_steps`, or one under a tool of the CUDA toolkit.

    Attributes:
        name: Its name.
        seconds: Its limit of time.
        decides: What its outcome decides.
        tool: The program that watches it; "": none.
        options: Of the tool.
        environment: Further variables.
    """

    name: str
    seconds: float
    decides: str
    tool: str = ""
    options: Sequence[str] = ()
    environment: Mapping[str, str] = {}


STEPS = (
    Step("about", 25, "what the rest can do: device, clocks, copy rate, versions, links"),
    Step(
        "profile",
        45,
        "what limits two_shot and encode: instructions issued, stalls, memory, registers spilled",
        "ncu",
        [argument for section in PROFILE for argument in ("--section", section)]
        + ["--page", "raw", "--csv", "--kernel-name", "regex:fused_kernel|combine_warp_kernel"],
    ),
    Step("training", 110, "what compression adds to a step of GPT-2 124M, grouped and not, guarded and not"),
    Step("kernels", 75, "whether kernels reach 0.85 of the memory floor; whether torch.compile's do"),
    Step("golden", 60, "whether kernels and fused collectives have the CPU's bytes"),
    Step("nccl", 75, "whether the default path between ranks has the CPU's bits, and its time beside NCCL's"),
    Step("groups", 30, "whether two groups in opposite order can stop each other"),
    Step(
        "memcheck",
        30,
        "whether kernels leave their memory",
        "compute-sanitizer",
        ("--tool", "memcheck", *SANITIZE),
    ),
    Step("racecheck", 30, "whether threads race", "compute-sanitizer", ("--tool", "racecheck", *SANITIZE)),
    Step(
        "absent",
        20,
        "whether a rank that is missing in a replayed graph is reported, and stale sums are not used",
    ),
)


def tool_path(tool: str) -> str | None:
    """Where a program of the CUDA toolkit is; None if it is not found."""
    return shutil.which(tool, path=os.pathsep.join([os.environ["PATH"], *TOOLS]))


def command(step: Step, out: Path, rehearse: bool, seconds: float) -> list[str] | str:
    """The step's command, or why it cannot run."""
    program = [
        sys.executable,
        "-m",
        "bench.common.visit_steps",
        step.name,
        "--json",
        str(out / f"{step.name}.json"),
    ]
    program += ["--seconds", str(round(seconds * 0.8)), *(["--rehearse"] if rehearse else [])]
    if not step.tool or rehearse:
        return program
    tool = tool_path(step.tool)
    if tool is None:
        return f"{step.tool} was not found; it comes with the CUDA toolkit"
    log = ["--log-file", str(out / f"{step.name}.csv")] if step.tool == "ncu" else []
    return [tool, *step.options, *log, *program]


def run(step: Step, out: Path, rehearse: bool, left: float) -> dict[str, Any]:
    """Run a step within the time that is left and return its record."""
    seconds = min(step.seconds * (4 if rehearse else 1), left)
    record: dict[str, Any] = {"step": step.name, "decides": step.decides, "rehearsed": rehearse}
    chosen = command(step, out, rehearse, seconds)
    if isinstance(chosen, str) or seconds < 5:
        return record | {"outcome": f"NOT RUN: {chosen if isinstance(chosen, str) else 'no time was left'}"}
    began = time.monotonic()
    result, log = out / f"{step.name}.json", out / f"{step.name}.log"
    result.unlink(missing_ok=True)
    # Else spare memory in torch's pool hides an overrun from the sanitizer.
    sanitized = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if step.tool == "compute-sanitizer" else {}
    with log.open("w") as file:
        process = subprocess.Popen(
            chosen,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | sanitized | dict(step.environment),
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
            outcome = "passed" if status == 0 else f"FAILED with status {status}: {last_line(log)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            outcome = f"CUT OFF after {seconds:.0f} s"
    record |= {"outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
    return record | {"found": json.loads(result.read_text()) if result.exists() else None}


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def visit(steps: Sequence[Step], out: Path, seconds: float, rehearse: bool = False) -> int:
    """Run the steps, write what is known after each, and return 0 if all have passed."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    records: list[dict[str, Any]] = []
    for step in steps:
        if records and records[0]["step"] == "about" and records[0]["outcome"] != "passed":
            records.append({"step": step.name, "decides": step.decides, "outcome": "NOT RUN: no device"})
        else:
            print(f"--- {step.name}: {step.decides}", flush=True)
            records.append(run(step, out, rehearse, end - time.monotonic()))
        record = records[-1]
        for line in (record.get("found") or {}).get("lines", []):
            print(f"    {line}")
        print(f"    {record['outcome']}", flush=True)
        write_file(out / "visit.json", json.dumps(records, indent=1) + "\n")
    print("--- summary")
    for record in records:
        print(f"{record['step']:<10} {record.get('seconds', 0):>6.1f} s  {record['outcome']}")
    return 0 if all(record["outcome"] == "passed" for record in records) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="where results and logs go")
    parser.add_argument("--seconds", type=float, default=500, help="of all steps together")
    parser.add_argument("--steps", nargs="+", choices=[step.name for step in STEPS], help="only these")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, without a device")
    options = parser.parse_args()
    chosen = [step for step in STEPS if not options.steps or step.name in options.steps]
    return visit(chosen, options.out, options.seconds, options.rehearse)


if __name__ == "__main__":
    sys.exit(main())
