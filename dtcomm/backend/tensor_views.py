"""Conversions between the tensors of torch.distributed's calls and those that the engine takes.

The engine takes contiguous one-dimensional tensors of the dtypes that it can send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dtcomm.codecs.base import ELEMENT_TYPES

MAX_RETAINED_BYTES = 64 * 2**20  # the largest staging buffer that is kept between calls


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one dimension: a view if the tensor is contiguous, otherwise a copy."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.reshape(-1)


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
            or tensor.dtype != first.dtype
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        address += tensor.numel() * tensor.element_size()
        numel += tensor.numel()
    return first.detach().as_strided((numel,), (1,))


def copy_to_tensors(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy consecutive parts of ``flat`` to the tensors."""
    offset = 0
    for tensor in tensors:
        numel = tensor.numel()
        tensor.detach().copy_(flat[offset : offset + numel].view(tensor.shape))
        offset += numel


def copy_back_of(flat: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None] | None:
    """Return a function that copies ``flat``, made by `flatten`, back to ``tensor``; None if it is a view of it."""
    return None if shares_memory(flat, tensor) else lambda: copy_to_tensors([tensor], flat)


def require_alike(
    tensors: Sequence[torch.Tensor], like: torch.Tensor, ranks: int, operation: str, argument: str
) -> None:
    """Require one tensor per rank, each with the dtype and number of elements of ``like``.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: There are more or fewer tensors than ranks, or a tensor has another number of elements.
    """
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
