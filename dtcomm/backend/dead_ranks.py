"""Which rank is gone, when somebody else's error only says that a connection broke."""

from __future__ import annotations

import re
import time
from pathlib import Path

from dtcomm.errors import DtcommError, PeerLost
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.torchdist.fault_attribution import GRACE_SECONDS

_PID = re.compile(r"pid (\d+)")


def gone(communicator: Communicator) -> list[str]:
    """The names of ranks of this host whose processes have ended."""
    if communicator.hosts > 1:
        return []
    return [name for name in communicator.names if (pid := _PID.search(name)) and not _runs(pid.group(1))]


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def lost(communicator: Communicator | None, cause: RuntimeError) -> DtcommError:
    """PeerLost that names who can be named."""
    reason = str(cause).splitlines()[0]
    names = [] if communicator is None else gone(communicator)
    # The kernel closes a dying process's connections a moment before it counts the process as ended.
    deadline = time.monotonic() + GRACE_SECONDS
    while communicator is not None and communicator.hosts == 1 and not names and time.monotonic() < deadline:
        time.sleep(0.01)
        names = gone(communicator)
    who = " and ".join(names) if names else "a rank of the group"
    return PeerLost(f"{who} is gone ({reason})")
