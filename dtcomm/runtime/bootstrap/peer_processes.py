"""The processes of other ranks on this machine, by which a rendezvous notices that a rank has died.

A rank tells its process in the first message of each rendezvous; it is remembered for the later ones of all groups.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm.errors import PeerLost

_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat after the name of the program


class _Process(NamedTuple):
    name: str  # of the rank
    pid: int
    started: str  # a later process may get the same pid


# Ranks belong to a default group: after another init_process_group they may be other processes.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _Process]] = weakref.WeakKeyDictionary()


def machine() -> str:
    """A string that is equal for processes that see each other's pids; empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def own() -> dict[str, Any]:
    """This process, as JSON values."""
    return {"machine": machine(), "pid": os.getpid(), "started": _started(os.getpid()) or ""}


def remember(
    global_ranks: Sequence[int], names: Sequence[str], processes: Sequence[Mapping[str, Any]]
) -> None:
    """Remember the processes of ranks on this machine; ``processes`` are what they say of themselves.

    Raises:
        PeerLost: If one has ended since.
    """
    here = machine()
    world: Any = c10d._world
    known = _known.setdefault(world.default_pg, {})
    for rank, name, process in zip(global_ranks, names, processes, strict=True):
        if here and process["machine"] == here and process["started"]:
            known[rank] = _Process(name, process["pid"], process["started"])
    require_alive(global_ranks)


def has_ended(global_rank: int) -> bool:
    """Whether the process of a rank on this machine is known to have ended."""
    world: Any = c10d._world
    process = _known.get(world.default_pg, {}).get(global_rank)
    return process is not None and _has_ended(process)


def require_alive(global_ranks: Sequence[int], grace_s: float = 0.0) -> None:
    """PeerLost if a rank is known to have died, or is found dead within ``grace_s`` seconds.

    Memory and connections of a process that is killed go before the process has ended.
    """
    world: Any = c10d._world
    known = _known.get(world.default_pg, {})
    processes = [known[rank] for rank in global_ranks if rank in known]
    end = time.monotonic() + grace_s
    while True:
        for process in processes:
            if _has_ended(process):
                raise PeerLost(
                    f"{process.name} is gone: its process ended while the ranks made a communicator"
                )
        if time.monotonic() >= end:
            return
        time.sleep(5e-3)


def _has_ended(process: _Process) -> bool:
    started = _started(process.pid)
    if started is not None:
        return started != process.started
    try:  # /proc may hide the processes of other users
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _started(pid: int) -> str | None:
    """When a process started; empty if it has ended and its parent has not asked for it, None if /proc has none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return "" if fields[_STATE] in "ZX" else fields[_START_TIME]
