"""A torch.distributed group as something that moves bytes in rounds, each handed over in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as _c10d

Letter = tuple[torch.Tensor, int, int]  # bytes, the peer, a tag where the backend knows tags


class Exchange(Protocol):
    """What a :class:`~dtcomm.runtime.torchdist.stream_runtime.StreamRuntime` hands rounds to.

    What is started follows the current stream; nothing is waited for. The memory stays as it is, and is kept, until
    the handle was waited for.
    """

    name: str

    def all_to_all(
        self, out: torch.Tensor, out_parts: Sequence[int], given: torch.Tensor, given_parts: Sequence[int]
    ) -> Any:
        """Bytes to and from every rank, in rank order; parts count bytes."""

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> Any:
        """Every rank's ``given`` to all; ``given`` may be this rank's place in ``out``."""

    def letters(self, sends: Sequence[Letter], receives: Sequence[Letter]) -> Any:
        """Messages to and from some ranks; two ranks list what is between them in the same order."""

    def wait(self, handle: Any) -> None:
        """The current stream waits for what was started; on the CPU the caller does."""


class GroupExchange:
    """Over the backend called ``name``, which nobody else may use, with tensors of ``device``."""

    def __init__(self, backend: Any, name: str, device: torch.device) -> None:
        self._group = backend
        self.name = name
        # As one launch: a group of several messages, not of one after the other that could wait for each other.
        self._together = device.type != "cpu"

    def all_to_all(
        self, out: torch.Tensor, out_parts: Sequence[int], given: torch.Tensor, given_parts: Sequence[int]
    ) -> list[Any]:
        options = _c10d.AllToAllOptions()
        _on_its_own_stream(options)
        return [self._group.alltoall_base(out, given, list(out_parts), list(given_parts), options)]

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> list[Any]:
        options = _c10d.AllgatherOptions()
        _on_its_own_stream(options)
        return [self._group._allgather_base(out, given, options)]

    def letters(self, sends: Sequence[Letter], receives: Sequence[Letter]) -> list[Any]:
        if self._together:
            self._group._start_coalescing()
        works = [self._group.recv([into], peer, tag) for into, peer, tag in receives]
        works += [self._group.send([bytes], peer, tag) for bytes, peer, tag in sends]
        return [self._group._end_coalescing()] if self._together else works

    def wait(self, handle: list[Any]) -> None:
        for work in handle:
            work.wait()  # without a timeout: with one, NCCL would hold the host

    def close(self) -> None:
        """End it, and what it still does."""
        (getattr(self._group, "shutdown", None) or self._group._shutdown)()


def _on_its_own_stream(options: Any) -> None:
    # Otherwise some versions of torch run the collective on the caller's stream, where nothing overlaps it.
    options.asyncOp = True
