"""Facts about the GPU and the software of a measurement: name, driver, clocks, versions.

Benchmarks and the command line write them into their JSON results.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtcomm

# nvidia-smi's field names and the keys used in results
NVIDIA_SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.sm": "highest_sm_clock_mhz",
    "clocks.max.mem": "highest_memory_clock_mhz",
    "power.limit": "power_limit_w",
}
DRIVER = Path("/proc/driver/nvidia/version")


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """Return name, uuid, compute capability, memory, driver and clocks of a CUDA device; None for unknown values."""
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    fields = query_nvidia_smi(uuid)
    fields["driver"] = fields["driver"] or _driver_version()
    return {
        "name": properties.name,
        "uuid": uuid,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        **fields,
    }


def versions() -> dict[str, Any]:
    """Return the versions of dtcomm, torch, CUDA, NCCL and Python, and the number of CPU cores."""
    nccl = None
    if torch.version.cuda is not None and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "dtcomm": dtcomm.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def query_nvidia_smi(uuid: str) -> dict[str, Any]:
    """Return nvidia-smi's fields for the device with this uuid; None for missing values or without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    text = ""
    if program is not None:
        query = [program, f"--query-gpu=uuid,{','.join(NVIDIA_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            text = ""
    return parse_nvidia_smi(text, uuid)


def parse_nvidia_smi(text: str, uuid: str) -> dict[str, Any]:
    """Parse the line of nvidia-smi's CSV output for the device with this uuid; numbers become floats."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 1 + len(NVIDIA_SMI_FIELDS) and uuid and cells[0].removeprefix("GPU-") == uuid:
            return dict(
                zip(NVIDIA_SMI_FIELDS.values(), map(_value, NVIDIA_SMI_FIELDS, cells[1:]), strict=True)
            )
    return dict.fromkeys(NVIDIA_SMI_FIELDS.values())


def _value(name: str, cell: str) -> Any:
    if name == "driver_version":
        return cell or None
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def _driver_version() -> str | None:
    try:
        match = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", DRIVER.read_text())
    except OSError:
        return None
    return match.group(1) if match else None
