"""The processes of other ranks: which of them have ended, and a Gloo backend that notices it while it connects.

A rank tells its process in the first message of each rendezvous; it is remembered for the later ones of all groups.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import torch_compat
from dtcomm.errors import DtcommError, PeerLost
from dtcomm.runtime.process_groups import Deadline
from dtcomm.work import completion

_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat after the name of the program
_GAVE_UP_KEY = "gave_up"  # beside Gloo's keys, which are numbers
_GLOO_POLL_S = 0.02
# For the rank that is the cause to report its error, or for its process to end, after its connections have.
_GLOO_GRACE_S = 1.0
# With these errors of the system this rank itself is the cause, and reports them at once.
_OWN_ERRORS = tuple(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)))
_MARGIN_S = 1.0  # of the deadline, in which the ranks find out which of them did not come


class PeerProcess(NamedTuple):
    """The process of a rank on this machine."""

    name: str  # of the rank
    pid: int
    started: str  # a later process may get the same pid

    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        return has_ended(self.pid, self.started)


# Ranks belong to a default group: after another init_process_group they may be other processes.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, PeerProcess]] = weakref.WeakKeyDictionary()


def has_ended(pid: int, started: str = "") -> bool:
    """Whether a process of this machine is known to have ended: the one question that Python asks about a process.

    ``started`` tells it from a later process with the same pid; empty: not known. ``csrc/engine/process_handle.cpp``
    asks it for the engine.
    """
    now = _started(pid)
    if now is not None:
        return now != started if started else not now
    try:  # /proc may hide the processes of other users
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


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

    PeerLost if one has ended since.
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
    group = torch_compat.default_group()
    return {} if group is None else _known.setdefault(group, {})  # None: another thread has destroyed it


def _started(pid: int) -> str | None:
    """When a process started; empty if it has ended and its parent has not asked for it, None if /proc has none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return "" if fields[_STATE] in "ZX" else fields[_START_TIME]


def connect_gloo(
    store: c10d.Store,
    flags: c10d.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    deadline: Deadline,
    check: Callable[[], None],
) -> Any | None:
    """Connect all ranks through Gloo, and notice meanwhile that one of them has died or given up.

    Gloo's constructor connects all ranks and waits up to five times its timeout for a rank that has died. So it runs in
    a thread, beside which this one looks at the other ranks.

    Args:
        store: The store through which Gloo exchanges addresses. The thread waits in it, also after this call has ended.
        flags: The same store through another client, since one in which a thread waits serves no other.
        timeout: The timeout of later operations.
        check: Called while it waits, raises what is to end the wait.

    Returns:
        The backend, or None if the ranks had not connected shortly before the deadline of one of them. DtcommError if a
        connection failed and ``check`` raised nothing soon after.
    """
    result: Future[Any] = Future()

    def construct() -> None:
        try:
            result.set_result(dist.ProcessGroupGloo(store, rank, size, timeout))
        except BaseException as error:
            result.set_exception(error)

    completion.start_thread(construct, "dtcomm-gloo")
    margin_s = min(_MARGIN_S, deadline.timeout_s / 10)
    while not wait([result], _GLOO_POLL_S).done:
        check()
        if flags.check([_GAVE_UP_KEY]):
            return None
        if deadline.left_s() < margin_s:
            flags.set(_GAVE_UP_KEY, "")  # the others' deadlines may be later
            return None
    try:
        return result.result()
    except RuntimeError as error:
        is_cause = any(text in str(error) for text in _OWN_ERRORS)
        grace_end = time.monotonic() + (0 if is_cause else _GLOO_GRACE_S)
        while time.monotonic() < grace_end:
            check()
            time.sleep(_GLOO_POLL_S)
        reason = str(error).splitlines()[0].rpartition("] ")[2]
        raise DtcommError(f"Gloo could not connect the ranks: {reason}") from error
