"""The groups that take what the engine does not do: Gloo for CPU tensors, NCCL for those on a GPU.

A child is made when it is first needed. Making one asks nothing of the other ranks: Gloo connects to a rank when it
first sends to it, NCCL at its first operation.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm.backend.fallback_report import Ledger

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
_LOST = ("connection", "closed by peer", "reset", "broken pipe", "refused")  # how Gloo tells of a dead rank


class Children:
    """Those of one group. ``explain(error)`` makes of Gloo's word of a lost connection an error that names the rank."""

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ledger: Ledger,
        explain: Callable[[RuntimeError], Exception],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._ledger = ledger
        self._explain = explain
        self._made: dict[str, tuple[str, Any, dist.ProcessGroup]] = {}

    def run(self, what: str, why: str, device: torch.device, call: Callable[[Any], Any]) -> Handed:
        """Have the child for ``device`` carry out an operation: ``call`` makes it on the group it is given."""
        name, _, child = self._child(device)
        self._ledger.hand(what, name, why)
        try:
            return Handed(call(child), self._translate)
        except RuntimeError as error:
            raise self._translate(error) from error

    def backend(self, device: torch.device) -> Any:
        """The backend object of torch that serves ``device``."""
        return self._child(device)[1]

    def set_timeout(self, timeout: timedelta) -> None:
        """For those that are made already, and those to come."""
        self._timeout = timeout
        for _, backend, _ in self._made.values():
            backend._set_default_timeout(timeout)

    def close(self, abort: bool = False) -> None:
        """Let go of all of them."""
        for _, backend, _ in self._made.values():
            if abort:
                backend.abort()
            else:
                backend.shutdown()
        self._made.clear()

    def _child(self, device: torch.device) -> tuple[str, Any, dist.ProcessGroup]:
        found = self._made.get(device.type)
        if found is None:
            prefixed = c10d.PrefixStore(f"{device.type}/", self._store)
            kinds = dist.ProcessGroup.BackendType
            # A torch made for CUDA has NCCL on a machine without a GPU, too, where functions of its ask about CUDA.
            if device.type == "cuda" and dist.is_nccl_available() and torch.cuda.is_available():
                name, kind, backend = "nccl", kinds.NCCL, self._nccl(prefixed)
            else:
                name, kind, backend = "gloo", kinds.GLOO, self._gloo(prefixed)
            group = dist.ProcessGroup(prefixed, self._rank, self._size)
            group._set_default_backend(kind)
            group._register_backend(device, kind, backend)
            found = self._made[device.type] = (name, backend, group)
        return found

    def _gloo(self, store: c10d.Store) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_default_device(lazy_init=True)]
        options._timeout = self._timeout
        made = gloo(store, self._rank, self._size, options)
        made._set_sequence_number_for_group()
        return made

    def _nccl(self, store: c10d.Store) -> Any:
        nccl: Any = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = self._timeout
        return nccl(store, self._rank, self._size, options)

    def _translate(self, error: RuntimeError) -> Exception:
        said = str(error).lower()
        return self._explain(error) if any(word in said for word in _LOST) else error


class Handed(dist.Work):
    """An operation of a child."""

    def __init__(self, work: Any, translate: Callable[[RuntimeError], Exception]) -> None:
        super().__init__()
        self._work = work
        self._translate = translate

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            done: bool = self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            said = self._translate(error)
            if said is error:
                raise
            raise said from error
        return done

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done

    def is_success(self) -> bool:
        done: bool = self._work.is_success()
        return done

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()

    def result(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = self._work.result()
        return tensors

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future
