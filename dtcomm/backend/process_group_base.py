"""Base class of the process group: fallbacks, the handles that callers get, and conversions of tensors.

The engine takes contiguous one-dimensional tensors of the dtypes that it can send.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.backend.fallback_backends import CPU, FallbackBackends
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.runtime.plans import run_repeated
from dtcomm.torch_compat import exclude_from_compilation
from dtcomm.work import COMPLETED, CompositeWork, TorchWork, Work

#: The handle of synchronous calls: callers only check that it is complete, and making one takes as long as the call.
COMPLETED_WORK = TorchWork(COMPLETED, ())

#: What `dtcomm.collectives` adds to the arguments of a repeated call: codec, algorithm and checksum, by default.
DEFAULTS = ("none", "auto", None)


class ProcessGroupBase(dist.ProcessGroup):
    """A process group with fallback backends; subclasses add the operations.

    ``_coalesced`` collects the handles of operations between ``_start_coalescing`` and ``_end_coalescing``; it is None
    outside.
    """

    _fallbacks: FallbackBackends
    _messages: Any  # a MessageMatcher, whose module imports this one
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
        self, operation: str, reason: str, device: torch.device, method: str, *arguments: Any
    ) -> dist.Work:
        """Carry out an operation by ``method`` of the fallback's process group for ``device``, and count it."""
        return self._fallbacks.run(
            operation, reason, device, lambda group: getattr(group, method)(*arguments)
        )

    def _fall_back_contiguous(
        self,
        operation: str,
        reason: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        call: Callable[[Any, list[torch.Tensor], list[torch.Tensor]], Any],
    ) -> dist.Work:
        """As `_fall_back`, on contiguous copies of CPU tensors with gaps: Gloo ignores strides.

        ``call`` receives the process group of the fallback, the outputs and the inputs.
        """
        device = next((tensor.device for tensor in (*outputs, *inputs)), CPU)
        dense_outputs = [_contiguous(tensor) for tensor in outputs]
        dense_inputs = [_contiguous(tensor) for tensor in inputs]
        work = self._fallbacks.run(
            operation, reason, device, lambda group: call(group, dense_outputs, dense_inputs)
        )
        copied = [pair for pair in zip(outputs, dense_outputs, strict=True) if pair[0] is not pair[1]]
        if copied:
            work.copy_when_done(copied, list(outputs))
        return work

    def _repeat(
        self, repeated: tuple[Any, ...], opts: Any, outputs: Sequence[torch.Tensor], limit: timedelta | None
    ) -> dist.Work | None:
        """Run a call that repeats an earlier one on contiguous CPU tensors, or return None and do nothing.

        ``repeated`` is what the function of `dtcomm.collectives` passes to `run_repeated`. That function has checked
        the earlier call, so this one needs no check.
        """
        if self._messages.unstarted:
            self._messages.start()
        work = run_repeated(repeated, is_async(opts))
        if work is None:
            return COMPLETED_WORK
        return None if work is False else self._make_work(work, outputs, limit)

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
        return self._make_work(work, outputs, on_completion=copy_back_of(flat_outputs, outputs))


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


MAX_RETAINED_BYTES = 64 * 2**20  # the largest staging buffer that is kept between calls


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a functional collective has given, once it is complete; other tensors unchanged."""
    if type(tensor) is not torch.Tensor and hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor
        completed: torch.Tensor = tensor.trigger_wait()
        return completed
    return tensor


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one contiguous dimension: a view if the tensor is contiguous, otherwise a copy."""
    # reshape alone returns a view with gaps for a column of a matrix
    return plain(tensor).detach().resolve_conj().resolve_neg().reshape(-1).contiguous()


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense CPU tensor, or a contiguous copy if it has gaps; other tensors unchanged."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return tensor
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return flatten(tensor).view(tensor.shape)


def as_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional tensor in a dtype that the engine can move: unchanged, or viewed as bytes."""
    return tensor if tensor.dtype in ELEMENT_TYPES else tensor.view(torch.uint8)


def shares_memory(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether ``flat``, made from ``tensor`` by `flatten`, is a view of its memory."""
    return flat.data_ptr() == tensor.data_ptr() and tensor.is_contiguous() and not tensor.is_conj()


def joined_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors as one flat view if they lie back to back in one storage, as those of ``chunk`` do."""
    first = tensors[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    numel = 0
    for tensor in tensors:
        if (
            tensor.data_ptr() != address
            or not tensor.is_contiguous()
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.dtype != first.dtype
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        address += tensor.numel() * tensor.element_size()
        numel += tensor.numel()
    return first.detach().as_strided((numel,), (1,))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of the tensors as one dimension: a view if they lie back to back, otherwise a copy."""
    view = joined_view(tensors)
    return torch.cat([flatten(tensor) for tensor in tensors]) if view is None else view


def copy_to_tensors(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy consecutive parts of ``flat`` to the tensors."""
    offset = 0
    for tensor in tensors:
        numel = tensor.numel()
        tensor.detach().copy_(flat[offset : offset + numel].view(tensor.shape))
        offset += numel


def copy_back_of(flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Return a function that copies what `flatten` made back to the tensors; None if all are views of their memory."""
    copied = [(tensor, flat) for tensor, flat in zip(tensors, flats) if not shares_memory(flat, tensor)]

    def copy_back() -> None:
        for tensor, flat in copied:
            copy_to_tensors([tensor], flat)

    return copy_back if copied else None


def require_alike(
    tensors: Sequence[torch.Tensor], like: torch.Tensor, ranks: int, operation: str, argument: str
) -> None:
    """Require one tensor per rank, each with the dtype (TypeError) and number of elements (ValueError) of ``like``."""
    if len(tensors) != ranks:
        raise ValueError(f"{operation}: {argument} has {len(tensors)} tensors, the group {ranks} ranks")
    for index, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            raise TypeError(f"{operation}: {argument}[{index}] is {tensor.dtype}, expected {like.dtype}")
        if tensor.numel() != like.numel():
            raise ValueError(
                f"{operation}: {argument}[{index}] has {tensor.numel()} elements, expected {like.numel()}"
            )


class StagingBuffer:
    """A buffer for outputs that must be rearranged; reused because fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """Return at least ``nbytes`` bytes, for the caller alone until they are returned with `put_back`."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer

    def put_back(self, buffer: torch.Tensor) -> None:
        """Keep the buffer for the next call."""
        if buffer.numel() <= MAX_RETAINED_BYTES:
            self._buffer = buffer
