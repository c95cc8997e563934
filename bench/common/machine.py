"""Description of the machine of a result, and detection of changes of its speed during a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from typing import TypeVar

from bench.common.native import round_trip_ns, share_one_core

T = TypeVar("T")
DISAGREE = 1.5  # same L3 has read 55 to 100 ns, different L3 310 to 480


def describe() -> dict[str, object]:
    """Return the CPU, cores, memory, kernel and library versions of this machine."""
    import torch

    fields = dict[str, str]()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    with open("/proc/meminfo", encoding="utf-8") as lines:
        memory_kib = int(next(lines).split()[1])
    return {
        "cpu": fields.get("model name", platform.processor()),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": next((f for f in ("avx512bw", "avx2") if f in flags), "generic"),
        "l3": _l3(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(os.path.dirname(__file__)),
    }


def _l3() -> str:
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index3/size", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def commit(checkout: str | os.PathLike[str]) -> str:
    """Return the short hash of the commit that a folder of a checkout is at, with ``-dirty`` if it was changed."""
    command = ["git", "-C", checkout, "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def placement(nanoseconds: float | None) -> str:
    """Return how close the first two cores are to each other.

    The round trip alone is not enough: it was 55 ns between cores of one L3 and 49 ns between two threads of a core.
    """
    if nanoseconds is None:
        return "one core"
    if nanoseconds < 90 and share_one_core():
        return "two threads of one core"
    return "same L3" if nanoseconds < 250 else "different L3"


def load() -> float:
    """Return how many tasks wanted a CPU during the last minute, this one included."""
    return os.getloadavg()[0]


def steady(measure: Callable[[], T], attempts: int = 3) -> tuple[T, dict[str, object]]:
    """Measure the cores' round trip before and after ``measure()``, and repeat all if the two values disagree.

    Returns:
        The measurement, and for the result file the round trips, the attempts, and whether the last was steady.
    """
    for attempt in range(1, attempts + 1):
        before = round_trip_ns()
        result = measure()
        after = round_trip_ns()
        agree = before is None or after is None or max(before, after) <= DISAGREE * min(before, after)
        if agree or attempt == attempts:
            break
    return result, {
        "round_trip_ns": [before, after],
        "placement": placement(after),
        "steady": agree,
        "attempts": attempt,
        "load": load(),
    }
