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


class PeerProcess(NamedTuple):
    """The process of a rank on this machine."""

    name: str  # of the rank
    pid: int
    started: str  # a later process may get the same pid

    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        started = _started(self.pid)
        if started is not None:
            return started != self.started
        try:  # /proc may hide the processes of other users
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


# Ranks belong to a default group: after another init_process_group they may be other processes.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, PeerProcess]] = weakref.WeakKeyDictionary()


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
    known = _of_default_group()
    for rank, name, process in zip(global_ranks, names, processes, strict=True):
        if here and process["machine"] == here and process["started"]:
            known[rank] = PeerProcess(name, process["pid"], process["started"])
    require_alive(global_ranks)


def of(global_ranks: Sequence[int]) -> list[PeerProcess | None]:
    """The remembered processes of ranks of the present default group; None: not on this machine, or not known."""
    known = _of_default_group()
    return [known.get(rank) for rank in global_ranks]


def require_alive(global_ranks: Sequence[int], grace_s: float = 0.0) -> None:
    """PeerLost if a rank is known to have died, or is found dead within ``grace_s`` seconds.

    Memory and connections of a process that is killed go before the process has ended.
    """
    processes = [process for process in of(global_ranks) if process is not None]
    end = time.monotonic() + grace_s
    while True:
        for process in processes:
            if process.has_ended():
                raise PeerLost(
                    f"{process.name} is gone: its process ended while the ranks made a communicator"
                )
        if time.monotonic() >= end:
            return
        time.sleep(5e-3)


def _of_default_group() -> dict[int, PeerProcess]:
    world: Any = c10d._world
    group = world.default_pg
    return {} if group is None else _known.setdefault(group, {})  # None: another thread has destroyed it


def _started(pid: int) -> str | None:
    """When a process started; empty if it has ended and its parent has not asked for it, None if /proc has none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return "" if fields[_STATE] in "ZX" else fields[_START_TIME]
