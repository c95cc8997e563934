"""The backends that carry out what the native engine does not: Gloo for CPU tensors, NCCL for tensors on GPUs.

They are created when first needed. Creating one involves no other rank: Gloo connects to a rank when it first sends to
it, NCCL in its first operation. Gloo's errors about broken connections are replaced by `PeerLost`, which names the
rank. What they carry out is counted for the backend's report.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import torch_compat
from dtcomm.errors import DtcommError, PeerLost
from dtcomm.runtime.bootstrap.processes import has_ended
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.torchdist.faults import GRACE_SECONDS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
_CONNECTION_ERRORS = ("connection", "closed by peer", "reset", "broken pipe", "refused")  # in Gloo's messages
_PID = re.compile(r"pid (\d+)")
_log = logging.getLogger("dtcomm.backend")


class _Fallback(NamedTuple):
    name: str
    backend: Any
    group: dist.ProcessGroup


class FallbackBackends:
    """The fallback backends of one process group; ``counts`` is (operation, backend, reason) → calls.

    ``communicator`` returns the group's communicator, or None before the first native operation; it knows the ranks'
    process ids.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        communicator: Callable[[], Communicator | None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._name = name
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._communicator = communicator
        self._fallbacks: dict[str, _Fallback] = {}  # by device type

    def run(
        self, operation: str, reason: str, device: torch.device, call: Callable[[Any], Any]
    ) -> FallbackWork:
        """Carry out an operation: ``call`` receives the process group of the fallback for ``device``."""
        fallback = self._fallback(device)
        entry = (operation, fallback.name, reason)
        if entry not in self.counts:
            _log.debug("group %s: %s falls back to %s: %s", self._name, *entry)
        self.counts[entry] += 1
        try:
            return FallbackWork(call(fallback.group), self._translate)
        except RuntimeError as error:
            raise self._translate(error) from error

    def backend(self, device: torch.device) -> Any:
        """Return torch's backend object for ``device``."""
        return self._fallback(device).backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of present and future backends."""
        self._timeout = timeout
        for fallback in self._fallbacks.values():
            fallback.backend._set_default_timeout(timeout)

    def close(self, abort: bool = False) -> None:
        """Shut down all backends, or abort them."""
        for fallback in self._fallbacks.values():
            if abort:
                fallback.backend.abort()
            else:
                fallback.backend.shutdown()
        self._fallbacks.clear()

    def _fallback(self, device: torch.device) -> _Fallback:
        fallback = self._fallbacks.get(device.type)
        if fallback is None:
            store = c10d.PrefixStore(f"{device.type}/", self._store)
            types = dist.ProcessGroup.BackendType
            # A torch built for CUDA has NCCL on machines without a GPU too, but there some of its functions fail.
            if device.type == "cuda" and dist.is_nccl_available() and torch.cuda.is_available():
                name, backend_type, backend = "nccl", types.NCCL, self._make_nccl(store)
            else:
                name, backend_type = "gloo", types.GLOO
                backend = torch_compat.make_gloo(store, self._rank, self._size, self._timeout)
            group = dist.ProcessGroup(store, self._rank, self._size)
            torch_compat.add_backend(group, device, backend_type, backend)
            fallback = self._fallbacks[device.type] = _Fallback(name, backend, group)
        return fallback

    def _make_nccl(self, store: c10d.Store) -> Any:
        nccl: Any = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = self._timeout
        return nccl(store, self._rank, self._size, options)

    def _translate(self, error: RuntimeError) -> Exception:
        message = str(error).lower()
        if any(phrase in message for phrase in _CONNECTION_ERRORS):
            return peer_lost_error(self._communicator(), error)
        return error


class FallbackWork(dist.Work):
    """The handle of an operation of a fallback backend; errors of its ``wait`` are translated.

    It is not a `TorchWork`: ``synchronize`` and ``block_current_stream`` of NCCL's own handle differ from its ``wait``.
    """

    def __init__(self, work: Any, translate: Callable[[RuntimeError], Exception]) -> None:
        super().__init__()
        self._work = work
        self._translate = translate
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._outputs: list[torch.Tensor] | None = None  # None: those of the backend's handle

    def copy_when_done(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], outputs: list[torch.Tensor]
    ) -> None:
        """Copy CPU tensors into the caller's before a caller sees the result; ``pairs`` are (caller's, copy)."""
        self._copied, self._outputs = pairs, outputs

    def _copy(self) -> None:
        pairs, self._copied = self._copied, []
        for tensor, copy in pairs:
            tensor.detach().copy_(copy)

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            completed: bool = self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            translated = self._translate(error)
            if translated is error:
                raise
            raise translated from error
        self._copy()
        return completed

    def is_completed(self) -> bool:
        completed: bool = self._work.is_completed()
        if completed:
            self._copy()
        return completed

    def is_success(self) -> bool:
        success: bool = self._work.is_success()
        return success

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self._work.synchronize()
        if self._copied:
            self.wait()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()

    def result(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = self._work.result()
        return tensors if self._outputs is None else self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        if self._outputs is None:
            return future

        def copy(done: torch.futures.Future[Any]) -> list[torch.Tensor] | None:
            done.value()
            self._copy()
            return self._outputs

        return future.then(copy)


# --- which rank has died -----------------------------------------------------------------


def dead_ranks(communicator: Communicator) -> list[str]:
    """Return the names of the ranks whose processes have ended; empty if ranks are on several hosts."""
    if communicator.hosts > 1:
        return []
    return [
        name for name in communicator.names if (match := _PID.search(name)) and has_ended(int(match.group(1)))
    ]


def peer_lost_error(communicator: Communicator | None, cause: RuntimeError) -> DtcommError:
    """Return a PeerLost error for a broken connection; it names the dead ranks as far as they are known."""
    reason = str(cause).splitlines()[0]
    names: list[str] = []
    if communicator is not None:
        names = dead_ranks(communicator)
        # The kernel closes the connections of a dying process shortly before it reports the process as ended.
        deadline = time.monotonic() + GRACE_SECONDS
        while communicator.hosts == 1 and not names and time.monotonic() < deadline:
            time.sleep(0.01)
            names = dead_ranks(communicator)
    who = " and ".join(names) if names else "a rank of the group"
    return PeerLost(f"{who} is gone ({reason})")
