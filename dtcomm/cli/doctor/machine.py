"""Checks that start no ranks: versions, build, CPU, CUDA, cores and environment variables."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from pathlib import Path

from dtcomm.cli.doctor.report import FAIL, NOTE, OK, Check

# names in /proc/cpuinfo of the features that the native kernels use
FEATURES = ("f16c", "avx2", "bmi1", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq")


def versions() -> Check:
    """Check the versions of dtcomm, torch, Python and the system."""
    import torch

    import dtcomm

    details = {
        "dtcomm": dtcomm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    found = [f"dtcomm {details['dtcomm']}", f"torch {details['torch']}", f"Python {details['python']}"]
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    status, hint = (OK, "") if release >= (2, 11) else (NOTE, " (dtcomm is tested with torch 2.11 and newer)")
    return Check(
        name="versions", status=status, summary=", ".join([*found, details["system"]]) + hint, details=details
    )


def build() -> Check:
    """Report how the native module was compiled and where it was loaded from."""
    from dtcomm import _C

    info: dict[str, str] = _C.build_info()
    details = {**info, "file": str(_C.__file__)}
    note = f"; sanitizers: {info['sanitize']}" if info["sanitize"] else ""
    return Check(
        name="build",
        status=NOTE if note else OK,
        summary=f"{info['compiler']} {info['type']} for {info['processor']}{note}; {info['flags']}",
        details=details,
    )


def kernels() -> Check:
    """Report the CPU's features and the kernels in use."""
    from dtcomm.kernels import ops

    model, features = _cpu()
    names, current = ops.available(), ops.current()
    best = names[0]
    status = OK if current == best else NOTE
    forced = "" if current == best else f" (forced; the fastest is {best})"
    return Check(
        name="kernels",
        status=status,
        summary=f"{current} in use{forced}, of {', '.join(names)}; {model}: {' '.join(features) or 'no AVX2'}",
        details={"current": current, "available": list(names), "cpu": model, "features": features},
    )


def _cpu() -> tuple[str, list[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), []
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return model.group(1) if model else platform.machine(), [name for name in FEATURES if name in present]


def cuda() -> Check:
    """Check whether ``_cuda`` was built and sees a device."""
    if importlib.util.find_spec("dtcomm._cuda") is None:
        card = Path("/dev/nvidiactl").exists()
        summary = "_cuda was not built" + (
            ", though this machine has a GPU: build again with nvcc on PATH" if card else ""
        )
        return Check(name="cuda", status=NOTE if card else OK, summary=summary, details={"built": False})
    from dtcomm import _cuda

    found = _cuda.platform()
    details = {"built": True, **found}
    built = f"_cuda built with CUDA {_version(found['runtime'])}"
    if not found["devices"]:
        why = found["error"] if found["driver"] else "no NVIDIA driver"
        return Check(name="cuda", summary=f"{built}; no device: {why}", details=details)
    devices = ", ".join(
        f"{device['name']} (sm_{device['capability'][0]}{device['capability'][1]}, {device['memory'] >> 30} GiB)"
        for device in found["devices"]
    )
    return Check(
        name="cuda",
        summary=f"{built}, driver for CUDA {_version(found['driver'])}; {devices}",
        details=details,
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def usable_cores() -> int:
    """Return the cores this process may use, from its affinity and the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def cores(ranks: int) -> Check:
    """Check whether each of ``ranks`` ranks has a core."""
    usable, total = usable_cores(), os.cpu_count() or 1
    oversubscribed = ranks > usable
    verdict = "they share cores; waiting ranks yield" if oversubscribed else "one core each"
    return Check(
        name="cores",
        status=NOTE if oversubscribed else OK,
        summary=f"{usable} of {total} usable; {ranks} ranks: {verdict}",
        details={"usable": usable, "total": total, "ranks": ranks, "oversubscribed": oversubscribed},
    )


def variables() -> Check:
    """Check that the DTCOMM_ variables that are set are known and valid."""
    from dtcomm import env
    from dtcomm.runtime import emulated_link

    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("DTCOMM_")}
    unknown = [name for name in given if name not in env.VARIABLES]
    wrong = []
    for name in set(given) - set(unknown):
        try:
            env.get(name)
            if name == "DTCOMM_LINK":
                emulated_link.links()
        except ValueError as error:
            wrong.append(str(error))
    text = ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    if wrong:
        text = "; ".join(sorted(wrong))
    elif unknown:
        text += f"; not known to dtcomm: {', '.join(unknown)}"
    status = FAIL if wrong else NOTE if unknown else OK
    return Check(name="variables", status=status, summary=text, details={"set": given, "unknown": unknown})
