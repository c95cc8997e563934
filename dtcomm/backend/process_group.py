"""The process group of the backend: the virtual functions of torch's, each a call of ``dtcomm.collectives``.

The names are torch's, old and new ones (``_allgather_base`` and ``all_gather_single``). Python's callers come here
without any C++ between; C++ callers (DDP's reducer, functional collectives) through torch's trampoline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import collectives
from dtcomm.backend import fallback_report
from dtcomm.backend import monitored_barrier as monitored
from dtcomm.backend.dead_ranks import lost
from dtcomm.backend.fallback_backends import CPU, CUDA, Children
from dtcomm.backend.gather_ops import Gathering
from dtcomm.backend.p2p_matching import Mail
from dtcomm.backend.reduce_ops import Reducing
from dtcomm.backend.work import Finished, Pending
from dtcomm.runtime.communicator_cache import existing_communicator, release

Opts = Any  # torch's options, or what its overloads have in their place


def create(options: Any, backend_options: Any) -> Group:
    """What torch calls for ``init_process_group`` and ``new_group`` (the extended form of ``register_backend``)."""
    if backend_options is not None:
        raise TypeError(f"pg_options: the backend dtcomm has none, got {type(backend_options).__name__}")
    monitored.install()
    return Group(
        options.store, options.group_rank, options.group_size, options.timeout, str(options.group_id)
    )


class Group(Reducing, Gathering):
    """Ranks that communicate through dtcomm. ``timeout`` is what a rank waits for the others at the most."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        # torch's constructor with a store makes no group that Python may extend.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.timeout = timeout
        self.over = False
        self._name, self._desc = name, "undefined"
        self._monitored = 0
        self._splits: Counter[str] = Counter()  # by the ranks in them
        self._own_store = store
        self._ledger = fallback_report.Ledger(name)
        self._children = Children(
            store, rank, size, timeout, self._ledger, lambda e: lost(existing_communicator(self), e)
        )
        self._mail = Mail(self)
        fallback_report.add(self)

    # --- what torch asks a group about -----------------------------------------------------------------------

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
        """The backend of torch that takes what the engine does not do on ``device``."""
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._children.backend(device)

    def get_group_store(self) -> c10d.Store:
        return self._own_store

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        communicator = existing_communicator(self)
        return 0 if communicator is None else communicator.calls

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._children.set_timeout(timeout)
        communicator = existing_communicator(self)
        if communicator is not None:
            communicator.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def account(self) -> dict[str, Any]:
        """This group's entry in a report."""
        handed = [
            {"what": what, "to": to, "why": why, "times": times}
            for (what, to, why), times in sorted(self._ledger.handed.items())
        ]
        communicator = existing_communicator(self)
        info: dict[str, Any] = {"operations": 0, "wire_bytes": 0}
        if communicator is None:
            info |= {"runtime": "none", "why": "nothing was moved yet", "ranks": self._ranks}
        else:
            info |= communicator.info()
        kept = ("runtime", "why", "ranks", "operations", "wire_bytes")
        return {"name": self._name, **{key: info[key] for key in kept}, "handed": handed}

    # --- the end ---------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._end(abort=False)

    def abort(self) -> None:
        self._end(abort=True)

    def _end(self, abort: bool) -> None:
        if not self.over:
            self.over = True
            self._mail.close()
            release(self)
            self._children.close(abort)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Opts = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Group | None:
        """A group of some of the ranks (given as ranks of this group); None on the others."""
        ranks = sorted(new_ranks)
        if self.rank() not in ranks:
            return None
        # Not told apart by the name: torch's may differ from rank to rank where splits were split before. How often
        # these ranks were split off is the same on all of them.
        listed = "-".join(map(str, ranks))
        self._splits[listed] += 1
        store = c10d.PrefixStore(f"split/{listed}/{self._splits[listed]}/", self._own_store)
        name = group_name or f"{self._name}:split:{listed}"
        group = Group(store, ranks.index(self.rank()), len(ranks), timeout or self.timeout, name)
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    # --- several operations as one ---------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._together = self._together or [], None
        return Joint(works)

    # --- without tensors, and between two --------------------------------------------------------------------

    def barrier(self, opts: Opts = None, timeout: timedelta | None = None) -> dist.Work:
        """All ranks have come here. With a GPU the device given also comes to rest, by NCCL's barrier."""
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return self._children.run("barrier", f"on {device.type}", device, lambda to: to.barrier(opts))
        given = timeout if timeout is not None else getattr(opts, "timeout", None)
        limit = given.total_seconds() if given is not None and given > timedelta(0) else None
        if limit is None and opts is not None and not opts.asyncOp:
            collectives.barrier(group=self)
            return Finished(())
        work = collectives.barrier(group=self, async_op=True)
        pending = Pending(work, (), limit)
        if opts is not None and not opts.asyncOp:
            pending.wait()
        return pending

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As ``torch.distributed.monitored_barrier``: rank 0 names the ranks that do not come."""
        self._monitored += 1
        monitored.barrier(
            self,
            self._own_store,
            self._monitored,
            self.timeout if timeout is None else timeout,
            wait_all_ranks,
        )

    monitored_barrier_of_dtcomm = monitored_barrier

    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        device = tensors[0].device
        if device.type != "cpu":
            return self._children.run(
                "send", f"on {device.type}", device, lambda to: to.send(tensors, dstRank, tag)
            )
        return self._mail.send(tensors[0], dstRank, tag)

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        device = tensors[0].device
        if device.type != "cpu":
            return self._children.run(
                "recv", f"on {device.type}", device, lambda to: to.recv(tensors, srcRank, tag)
            )
        return self._mail.receive(tensors[0], srcRank, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        device = tensors[0].device
        if device.type != "cpu":
            return self._children.run(
                "recv from any rank", f"on {device.type}", device, lambda to: to.recv_anysource(tensors, tag)
            )
        return self._mail.receive(tensors[0], None, tag)


class Joint(dist.Work):
    """Several operations, done when all are."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        gathered = torch.futures.collect_all([work.get_future() for work in self._works])

        def give(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            return [tensor for future in done.value() for tensor in future.value()]

        return gathered.then(give)
