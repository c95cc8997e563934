"""A private Gloo backend whose ranks notice while they connect that one of them has died or given up.

Gloo's constructor connects all ranks and waits up to five times its timeout for a rank that has died. So it runs in a
thread, beside which this one looks at the other ranks.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from dtcomm.errors import DtcommError
from dtcomm.runtime.bootstrap.store_exchange import Deadline
from dtcomm.work import completion

_GAVE_UP_KEY = "gave_up"  # beside Gloo's keys, which are numbers
_POLL_S = 0.02
# For the rank that is the cause to report its error, or for its process to end, after its connections have.
_GRACE_S = 1.0
# With these errors of the system this rank itself is the cause, and reports them at once.
_OWN_ERRORS = tuple(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)))
_MARGIN_S = 1.0  # of the deadline, in which the ranks find out which of them did not come


def connect(
    store: Store,
    flags: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    deadline: Deadline,
    check: Callable[[], None],
) -> Any | None:
    """Connect all ranks through Gloo.

    Args:
        store: The store through which Gloo exchanges addresses. The thread waits in it, also after this call has ended.
        flags: The same store through another client, since one in which a thread waits serves no other.
        rank: This rank.
        size: The number of ranks.
        timeout: The timeout of later operations.
        deadline: When connecting ends.
        check: Called while it waits, raises what is to end the wait.

    Returns:
        The backend, or None if the ranks had not connected shortly before the deadline of one of them.

    Raises:
        DtcommError: If a connection failed and ``check`` raised nothing soon after.
    """
    result: Future[Any] = Future()

    def construct() -> None:
        try:
            result.set_result(dist.ProcessGroupGloo(store, rank, size, timeout))
        except BaseException as error:
            result.set_exception(error)

    completion.start_thread(construct, "dtcomm-gloo")
    margin_s = min(_MARGIN_S, deadline.timeout_s / 10)
    while not wait([result], _POLL_S).done:
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
        grace_end = time.monotonic() + (0 if is_cause else _GRACE_S)
        while time.monotonic() < grace_end:
            check()
            time.sleep(_POLL_S)
        reason = str(error).splitlines()[0].rpartition("] ")[2]
        raise DtcommError(f"Gloo could not connect the ranks: {reason}") from error
