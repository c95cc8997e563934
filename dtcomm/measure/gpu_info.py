"""What a result must say about the GPU that it was measured on: name, driver, versions, clocks."""

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

# nvidia-smi's names, and ours
ASKED = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.sm": "highest_sm_clock_mhz",
    "clocks.max.mem": "highest_memory_clock_mhz",
    "power.limit": "power_limit_w",
}
DRIVER = Path("/proc/driver/nvidia/version")


def facts(device: torch.device) -> dict[str, Any]:
    """Of a CUDA device: what torch knows, and of driver and clocks what nvidia-smi tells; None where it does not."""
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    said = asked(uuid)
    said["driver"] = said["driver"] or _driver()
    return {
        "name": properties.name,
        "uuid": uuid,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        **said,
    }


def versions() -> dict[str, Any]:
    """Of dtcomm, torch, what torch was built with, and Python."""
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


def asked(uuid: str) -> dict[str, Any]:
    """What nvidia-smi says of the device with this id; None for what it does not say, or where it is not there."""
    program = shutil.which("nvidia-smi")
    text = ""
    if program is not None:
        query = [program, f"--query-gpu=uuid,{','.join(ASKED)}", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            text = ""
    return read(text, uuid)


def read(text: str, uuid: str) -> dict[str, Any]:
    """The line of nvidia-smi's CSV that is about the device; numbers as numbers."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 1 + len(ASKED) and uuid and cells[0].removeprefix("GPU-") == uuid:
            return dict(zip(ASKED.values(), map(_value, ASKED, cells[1:]), strict=True))
    return dict.fromkeys(ASKED.values())


def _value(name: str, cell: str) -> Any:
    if name == "driver_version":
        return cell or None
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def _driver() -> str | None:
    try:
        found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", DRIVER.read_text())
    except OSError:
        return None
    return found.group(1) if found else None
