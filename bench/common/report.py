"""What a program reports: a table on the terminal, and JSON at a path that the caller gives."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtcomm.system import write_file

ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, object]:
    """Return date, command, commit, load, and this machine's processor, memory, kernel and library versions."""
    import torch

    fields = dict[str, str]()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": commit(ROOT),
        "cpu": fields.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": next((flag for flag in ("avx512bw", "avx2") if flag in flags), "generic"),
        "memory_gib": round(memory / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def headline() -> str:
    """Return the machine and the commit in one line."""
    run = describe()
    return f"{run['cpu']}, {run['cores']} cores, {run['instruction_set']}, commit {run['commit']}, load {run['load']}"


def commit(checkout: Path) -> str:
    """Return the short hash of a checkout's commit, with ``-dirty`` if files differ from it."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write(path: str | os.PathLike[str], result: dict[str, Any]) -> Path:
    """Write a result with the `describe` of this run as JSON, and return its path."""
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, format_json({"run": describe(), **result}))
    return out


def format_json(document: dict[str, Any]) -> str:
    """Return JSON with one line for each entry of the document's lists and mappings of lists and mappings."""
    lines = [f" {json.dumps(key)}: {_format(value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _format(value: Any) -> str:
    entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(entry, dict | list) for entry in entries):
        return json.dumps(value)
    if isinstance(value, dict):
        lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + "\n }"
    return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"


def size_name(size: int) -> str:
    """Return ``1 KB`` for 1024."""
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def parse_size(text: str) -> int:
    """Return 65536 for ``64K``."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if scale > 1 else text) * scale


def microseconds(seconds: float) -> str:
    """Return microseconds with three significant digits, or as a whole number from 100 on."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is left-aligned."""
    cells = [list(map(str, row)) for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(f"\n{title}" if title else "")
    for row in cells:
        padded = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(padded).rstrip())
