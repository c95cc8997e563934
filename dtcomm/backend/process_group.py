"""The process group of the backend ``"dtcomm"``: torch's virtual functions as calls of ``dtcomm.collectives``.

Method names are torch's, old and new ones (``_allgather_base`` and ``all_gather_single``). Python code calls the
methods directly; C++ code (DDP's reducer, functional collectives) calls them through torch's trampoline class.

The module also contains the report on all groups of the backend and `monitored_barrier`.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import collectives, torch_compat
from dtcomm.backend.fallback_backends import CPU, CUDA, FallbackBackends, FallbackWork
from dtcomm.backend.gather_ops import GatherOps
from dtcomm.backend.p2p_matching import MessageMatcher
from dtcomm.backend.process_group_base import COMPLETED_WORK
from dtcomm.backend.reduce_ops import ReduceOps
from dtcomm.compress.report import RankReport
from dtcomm.errors import CollectiveTimeout
from dtcomm.runtime.communicator import existing_communicator, release
from dtcomm.work import CompositeWork, TorchWork

Opts = Any  # torch's options objects, or what its overloads take instead of them

_log = logging.getLogger("dtcomm.backend")
_POLL_S = 0.002  # pause between two polls of the store in a monitored barrier
_groups: weakref.WeakSet[DtcommProcessGroup] = weakref.WeakSet()  # all groups, for the report


def create(options: Any, backend_options: Any) -> DtcommProcessGroup:
    """Create a process group; torch calls this in ``init_process_group`` and ``new_group``.

    TypeError if ``pg_options`` were passed; the backend has none.
    """
    if backend_options is not None:
        raise TypeError(f"pg_options: the backend dtcomm has none, got {type(backend_options).__name__}")
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        _log.warning(
            "TORCH_DIST_NAN_CHECK: the backend dtcomm does not check; guard= of compress() names the rank"
        )
    _install_monitored_barrier()
    torch_compat.leave_out_of_flight_recorder(DtcommProcessGroup)
    torch_compat.complete_forward_pass_handles((TorchWork, FallbackWork))
    return DtcommProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, str(options.group_id)
    )


def _refused(name: str) -> Callable[..., NoReturn]:
    """Return a method of torch's groups that would do nothing here, or raise an error that names no backend."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{name}: groups of the backend dtcomm do not have it; operations are recorded where DTCOMM_FLIGHT_DIR is "
            "set, and errors are raised in the caller"
        )

    return refuse


class DtcommProcessGroup(ReduceOps, GatherOps):
    """A process group that communicates through dtcomm."""

    _messages: MessageMatcher
    supports_abort_hooks = supports_reconfigure = supports_window = supports_shrinking = False

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        # torch's constructor with a store makes a group that Python cannot extend.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.timeout = timeout
        self.closed = False
        self._name, self._desc = name, "undefined"
        self._monitored_barriers = 0
        self._split_counts: Counter[str] = Counter()  # by the ranks of the new group
        self._store = store
        self._fallbacks = FallbackBackends(
            store, rank, size, timeout, name, lambda: existing_communicator(self)
        )
        self._messages = MessageMatcher(self)
        _groups.add(self)

    # --- properties -----------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "dtcomm"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU, CUDA] if torch.cuda.is_available() else [CPU]

    def _get_backend(self, device: torch.device) -> Any:
        """Return torch's backend that carries out what the engine does not support on ``device``."""
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._fallbacks.backend(device)

    def get_group_store(self) -> c10d.Store:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        communicator = existing_communicator(self)
        return 0 if communicator is None else communicator.calls

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._fallbacks.set_timeout(timeout)
        communicator = existing_communicator(self)
        if communicator is not None:
            communicator.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def report_entry(self) -> dict[str, Any]:
        """Return this group's entry in `dtcomm.backend.report`."""
        fallbacks = [
            {"operation": operation, "backend": backend, "reason": reason, "count": count}
            for (operation, backend, reason), count in sorted(self._fallbacks.counts.items())
        ]
        communicator = existing_communicator(self)
        info: dict[str, Any] = {"operations": 0, "wire_bytes": 0}
        if communicator is None:
            info |= {"runtime": "none", "reason": "no operation yet", "ranks": self._ranks}
        else:
            info |= communicator.info()
        keys = ("runtime", "reason", "ranks", "operations", "wire_bytes")
        return {"name": self._name, **{key: info[key] for key in keys}, "fallbacks": fallbacks}

    # --- shutdown and split --------------------------------------------------------------------

    def shutdown(self) -> None:
        self._close(abort=False)

    def abort(self) -> None:
        self._close(abort=True)

    def _close(self, abort: bool) -> None:
        if not self.closed:
            self.closed = True
            self._messages.close()
            release(self)
            self._fallbacks.close(abort)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Opts = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> DtcommProcessGroup | None:
        """Return a group of some of the ranks (as ranks of this group), in this order; None on the other ranks.

        Up to 2.14 torch sorts them.
        """
        ranks = list(new_ranks)
        if self.rank() not in ranks:
            return None
        # The prefix cannot contain the name: torch's may differ between ranks after nested splits. How often these
        # ranks were split off is the same on all of them.
        rank_list = "-".join(map(str, ranks))
        self._split_counts[rank_list] += 1
        store = c10d.PrefixStore(f"split/{rank_list}/{self._split_counts[rank_list]}/", self._store)
        name = group_name or f"{self._name}:split:{rank_list}"
        group = DtcommProcessGroup(store, ranks.index(self.rank()), len(ranks), timeout or self.timeout, name)
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    # --- coalescing ---------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        self._messages.start()
        works, self._coalesced = self._coalesced or [], None
        outputs = [output for work in works for output in work.outputs]
        return TorchWork(CompositeWork(works, outputs), outputs)

    # --- barriers and point-to-point --------------------------------------------------------------------

    def barrier(self, opts: Opts = None, timeout: timedelta | None = None) -> dist.Work:
        """Wait for all ranks. With a GPU in the options, NCCL's barrier also waits for the device."""
        device = getattr(opts, "device", None)
        self._messages.start()
        if device is not None and device.type != "cpu":
            return self._fall_back("barrier", f"on {device.type}", device, "barrier", opts)
        limit = timeout if timeout is not None else getattr(opts, "timeout", None)
        limit_s = limit.total_seconds() if limit is not None and limit > timedelta(0) else None
        if limit_s is None and opts is not None and not opts.asyncOp:
            collectives.barrier(group=self)
            return COMPLETED_WORK
        work = collectives.barrier(group=self, async_op=True)
        torch_work = TorchWork(work, (), limit_s)
        if opts is not None and not opts.asyncOp:
            torch_work.wait()
        return torch_work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, as ``torch.distributed.monitored_barrier``: rank 0 names the ranks that do not arrive."""
        self._monitored_barriers += 1
        _monitored_barrier(
            self,
            self._store,
            self._monitored_barriers,
            self.timeout if timeout is None else timeout,
            wait_all_ranks,
        )

    dtcomm_monitored_barrier = monitored_barrier

    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        device = tensors[0].device
        if device.type != "cpu":
            return self._fall_back("send", f"on {device.type}", device, "send", tensors, dstRank, tag)
        return self._messages.send(tensors[0], dstRank, tag)

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        device = tensors[0].device
        if device.type != "cpu":
            return self._fall_back("recv", f"on {device.type}", device, "recv", tensors, srcRank, tag)
        return self._messages.receive(tensors[0], srcRank, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        device = tensors[0].device
        if device.type != "cpu":
            reason = f"on {device.type}"
            return self._fall_back("recv from any rank", reason, device, "recv_anysource", tensors, tag)
        return self._messages.receive(tensors[0], None, tag)


for _name in (
    "register_pre_hook",
    "register_post_hook",
    "register_abort_hook",
    "unregister_abort_hook",
    "_register_on_completion_hook",
    "merge_remote_group",
    "reconfigure",
    "get_reconfigure_handle",
    "revoke",
    "shrink",
    "new_window",
):
    setattr(DtcommProcessGroup, _name, _refused(_name))


# --- report --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendReport(RankReport):
    """The state of the backend's groups at the time of the call of `report`; ``str()`` gives lines of text.

    Attributes:
        groups: One dict of plain values for each live group, with ``name``, ``ranks`` (global), ``operations`` and
            ``wire_bytes``. ``runtime`` is ``"native"``, ``"process_group"``, or ``"none"`` before the first operation,
            ``reason`` why. ``fallbacks`` are dicts with ``operation``, ``backend``, ``reason`` and ``count``.
        rank: This rank.
    """

    groups: tuple[dict[str, Any], ...]
    rank: int = 0

    def summary(self) -> str:
        """Return a line for each group, without the operations that fell back."""
        lines = [line for line in str(self).splitlines() if not line.startswith("  fallback")]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: everything that the text says."""
        return {"rank": self.rank, "groups": list(self.groups)}

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            ranks = ", ".join(map(str, group["ranks"][:16])) + (", ..." if len(group["ranks"]) > 16 else "")
            lines.append(f"group {group['name']} (ranks {ranks}): {group['runtime']}: {group['reason']}")
            lines.append(f"  {group['operations']} operations, {group['wire_bytes']} bytes sent by this rank")
            for fallback in group["fallbacks"]:
                lines.append(
                    f"  fallback to {fallback['backend']}: {fallback['operation']}, {fallback['count']} times: "
                    f"{fallback['reason']}"
                )
        return "\n".join(lines) if lines else "no group of the backend dtcomm"


def report(group: Any = None) -> BackendReport:
    """Return what the groups of the backend ``"dtcomm"`` did natively and what fell back to other backends.

    Args:
        group: A process group of this backend. Default: all live groups.

    Returns:
        The report of this rank.

    Example::

        dist.init_process_group("dtcomm")
        ...
        dtcomm.backend.report().print(verbose=True)
    """
    groups = [live for live in _groups if not live.closed] if group is None else [group]
    entries = (live.report_entry() for live in groups)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return BackendReport(tuple(sorted(entries, key=lambda entry: str(entry["name"]))), rank)


# --- monitored_barrier ---------------------------------------------------------------------------


def _install_monitored_barrier() -> None:
    """Make torch's ``monitored_barrier`` accept groups of this backend: torch accepts only Gloo's, by name."""
    original: Any = c10d.monitored_barrier
    if hasattr(original, "dtcomm"):
        return

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        target: Any = torch_compat.group_or_raise(group)
        if target is dist.GroupMember.NON_GROUP_MEMBER or not hasattr(target, "dtcomm_monitored_barrier"):
            original(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        if limit is not None:
            torch_compat.check_timeout(limit)
        target.monitored_barrier(limit, wait_all_ranks)

    monitored_barrier.dtcomm = True  # type: ignore[attr-defined]
    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def _monitored_barrier(
    group: DtcommProcessGroup, store: c10d.Store, number: int, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Wait until all ranks of the group have called this; rank 0 collects the arrivals and answers.

    The ranks communicate through the store alone, so that it works when nothing else does. ``number`` keeps the keys of
    the group's barriers apart. CollectiveTimeout is raised on rank 0, which names the first missing rank, or all with
    ``wait_all_ranks``, and on the ranks that arrived.
    """
    rank, size, ranks = group.rank(), group.size(), dist.get_process_group_ranks(group)
    prefix = f"dtcomm/monitored/{number}"
    limit = f"{timeout.total_seconds() * 1000:.0f} ms"
    deadline = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        store.set(f"{prefix}/{rank}", "1")
        while not store.check([f"{prefix}/answer"]):
            if time.monotonic() >= deadline + 1.0:  # rank 0 may have timed out just now
                raise CollectiveTimeout(
                    f"Rank {ranks[rank]} successfully reached monitoredBarrier, but received errors while waiting "
                    f"for send/recv from rank {ranks[0]}, which did not answer within {limit}"
                )
            time.sleep(_POLL_S)
        answer = store.get(f"{prefix}/answer").decode()
        if answer != "all":
            raise CollectiveTimeout(
                f"Rank {ranks[rank]} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank {ranks[0]}. Please check rank {ranks[0]}'s logs for faulty rank. "
                f"It says: {answer}"
            )
        return
    if timeout <= timedelta(0):
        raise CollectiveTimeout(
            f"[Rank {ranks[0]}]: Rank {ranks[0]} timed out in monitoredBarrier after {limit}"
        )
    missing = list(range(1, size))
    while missing:
        missing = [peer for peer in missing if not store.check([f"{prefix}/{peer}"])]
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if missing:
        named = missing if wait_all_ranks else missing[:1]
        names = ", ".join(str(ranks[peer]) for peer in named)
        plural = "s" if len(named) > 1 else ""
        message = f"[Rank {ranks[0]}]: Rank{plural} {names} failed to pass monitoredBarrier in {limit}"
        store.set(f"{prefix}/answer", message)
        raise CollectiveTimeout(message)
    store.set(f"{prefix}/answer", "all")
    if number > 1:  # all ranks have arrived, so none still reads the keys of the previous barrier
        before = f"dtcomm/monitored/{number - 1}"
        for key in (f"{before}/answer", *(f"{before}/{peer}" for peer in range(1, size))):
            store.delete_key(key)
