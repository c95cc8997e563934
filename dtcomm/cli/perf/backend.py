"""Interface of a backend of ``dtcomm perf``, and the types its methods use."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.placement import CPU, CUDA, CpuPlacement, Placement


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective on given tensors.

    all_reduce, broadcast and reduce have in-place APIs and work on ``output``; if ``input`` is another tensor it is
    copied into ``output`` first.
    """

    collective: str
    output: torch.Tensor
    input: torch.Tensor
    op: str = "none"
    root: int = 0
    codec: str = "none"
    algorithm: str = "auto"

    @property
    def copies(self) -> bool:
        """Whether the input must be copied to the output first."""
        return COLLECTIVES[self.collective].in_place_api and self.output is not self.input


class TransportUsed(NamedTuple):
    """What moved the bytes of a call (fused, nccl, gloo, ...); ``reason`` says why it was not the expected one."""

    name: str
    reason: str = ""


class Backend(abc.ABC):
    """A library that carries out collectives.

    All ranks construct it, in the same order, after torch.distributed is initialized. The constructor raises ValueError
    with the reason if the backend is not available.

    Attributes:
        supports_codecs: Whether it has codecs and algorithms.
        devices: The devices its tensors may be on.
    """

    supports_codecs: ClassVar[bool] = False
    devices: ClassVar[tuple[str, ...]] = (CPU, CUDA)

    def __init__(self, timeout: float, place: Placement | None = None) -> None:
        self.place = place or CpuPlacement()
        self.group = dist.new_group(timeout=timedelta(seconds=timeout), backend=self.group_backend())

    def group_backend(self) -> str | None:
        """Return the torch.distributed backend of its group, or None for that of the default group (Gloo)."""
        return None

    @classmethod
    def why_unsupported(cls, collective: str, datatype: str, op: str) -> str | None:
        """Return why it cannot carry out such a call, or None if it can."""
        return None

    @abc.abstractmethod
    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        """Return a function that carries out the call, or that starts it and returns an object with ``wait()``."""

    def bind_with_copy(self, call: CollectiveCall, asynchronous: bool = False) -> Callable[[], Any]:
        """Return `bind`'s function, preceded by the copy that an out-of-place call needs."""
        run = self.bind(call, asynchronous)
        if not call.copies:
            return run
        copy, source = call.output.copy_, call.input

        def copy_and_run() -> Any:
            copy(source)
            return run()

        return copy_and_run

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor for calls; all ranks must call it in the same order."""
        return torch.empty(numel, dtype=dtype, device=self.place.device)

    def transport_snapshot(self) -> Any:
        """Return the counters that `transport_used` compares with."""
        return None

    def transport_used(self, before: Any) -> TransportUsed:
        """Return what moved the bytes since the snapshot ``before``."""
        return TransportUsed(dist.get_backend(self.group))

    def why_no_cuda_graph(self) -> str:
        """Return why a CUDA graph cannot capture its calls; empty if it can."""
        return ""

    def settled(self) -> bool:
        """Whether operations called so far are carried out as they will be from now on; the same on all ranks."""
        return True

    def describe(self) -> str:
        """Return a short description for the header."""
        return ""
