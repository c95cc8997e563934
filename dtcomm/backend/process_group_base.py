"""Base class of the process group: fallbacks, and the handles that callers get."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from dtcomm._compilation import exclude_from_compilation
from dtcomm.backend.fallback_backends import FallbackBackends
from dtcomm.backend.tensor_views import StagingBuffer, as_sendable, copy_to_tensors, flatten, shares_memory
from dtcomm.work import COMPLETED, CompositeWork, TorchWork, Work


class ProcessGroupBase(dist.ProcessGroup):
    """A process group with fallback backends; subclasses add the operations.

    ``_coalesced`` collects the handles of operations between ``_start_coalescing`` and ``_end_coalescing``; it is None
    outside.
    """

    _fallbacks: FallbackBackends
    _coalesced: list[TorchWork] | None = None

    def __init_subclass__(cls) -> None:
        for value in vars(cls).values():
            if isinstance(value, FunctionType):
                # Inside a compiled model torch calls the methods from C++, each of which would be a frame of its own.
                exclude_from_compilation(value)

    @functools.cached_property
    def _staging(self) -> StagingBuffer:
        return StagingBuffer()

    @functools.cached_property
    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self)

    def _fall_back(
        self, operation: str, reason: str, device: torch.device, call: Callable[[Any], Any]
    ) -> dist.Work:
        """Carry out an operation with the fallback backend for ``device``, and count it."""
        return self._fallbacks.run(operation, reason, device, call)

    def _make_work(
        self,
        work: Work | None,
        outputs: Sequence[torch.Tensor],
        limit: timedelta | None = None,
        on_completion: Callable[[], None] | None = None,
    ) -> dist.Work:
        """Return the caller's handle of an operation that has completed (``work`` is None) or is in progress.

        ``on_completion`` runs once, before a caller sees the outputs.
        """
        if work is None:
            if on_completion is not None:
                on_completion()
            return TorchWork(COMPLETED, outputs)
        if on_completion is not None:
            work = CompositeWork([work], outputs, on_completion)
        torch_work = TorchWork(work, outputs, limit.total_seconds() if limit else None)
        if self._coalesced is not None:
            self._coalesced.append(torch_work)
        return torch_work

    def _run_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        collective: Callable[..., Work | None],
        opts: Any,
    ) -> dist.Work:
        """Carry out a coalesced collective of dtcomm on contiguous tensors of sendable dtypes."""
        flat_outputs = [flatten(output) for output in outputs]
        work = collective(
            [as_sendable(flat) for flat in flat_outputs],
            [as_sendable(flatten(tensor)) for tensor in inputs],
            group=self,
            async_op=is_async(opts),
        )
        copied = [
            (output, flat) for output, flat in zip(outputs, flat_outputs) if not shares_memory(flat, output)
        ]

        def copy_back() -> None:
            for output, flat in copied:
                copy_to_tensors([output], flat)

        return self._make_work(work, outputs, on_completion=copy_back if copied else None)


def is_async(opts: Any) -> bool:
    """Return whether the call returns before the operation completes; calls without options do."""
    return bool(getattr(opts, "asyncOp", True))


def root_rank(opts: Any) -> int:
    """Return the root in torch's options, or passed in their place (``pg.gather(outputs, input, root)``)."""
    return int(getattr(opts, "rootRank", opts) or 0)


def unsupported_reason(*tensors: torch.Tensor) -> str:
    """Return why the engine cannot take the tensors (device or layout); empty if it can."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"on {tensor.device.type}"
        if tensor.layout is not torch.strided:
            return f"{str(tensor.layout).removeprefix('torch.')} tensor"
    return ""
