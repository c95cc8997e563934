"""Tensors as the engine takes them: one run of memory of a dtype that it can send."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.codecs.base import ELEMENT_TYPES

KEPT_BYTES = 64 * 2**20  # the largest staging memory that is kept from call to call


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their order as one dimension: the tensor's own memory where it is contiguous, else a copy."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.reshape(-1)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional tensor in a dtype that can be moved: its own, or bytes."""
    return tensor if tensor.dtype in ELEMENT_TYPES else tensor.view(torch.uint8)


def is_own(run: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether ``run``, made of ``tensor`` by ``flat``, is the tensor's own memory."""
    return run.data_ptr() == tensor.data_ptr() and tensor.is_contiguous() and not tensor.is_conj()


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one run of memory where they lie back to back in one storage, as the parts of ``chunk`` do."""
    first = tensors[0]
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    numel = 0
    for tensor in tensors:
        if (
            tensor.data_ptr() != at
            or not tensor.is_contiguous()
            or tensor.dtype != first.dtype
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        at += tensor.numel() * tensor.element_size()
        numel += tensor.numel()
    return first.detach().as_strided((numel,), (1,))


def put(tensors: Sequence[torch.Tensor], run: torch.Tensor) -> None:
    """Give each tensor its part of ``run``, in their order."""
    at = 0
    for tensor in tensors:
        numel = tensor.numel()
        tensor.detach().copy_(run[at : at + numel].view(tensor.shape))
        at += numel


def require_alike(
    several: Sequence[torch.Tensor], one: torch.Tensor, ranks: int, operation: str, argument: str
) -> None:
    """One tensor a rank, each like ``one``: TypeError or ValueError that names the one that is not."""
    if len(several) != ranks:
        raise ValueError(f"{operation}: {argument} has {len(several)} tensors, the group {ranks} ranks")
    for index, each in enumerate(several):
        if each.dtype != one.dtype:
            raise TypeError(f"{operation}: {argument}[{index}] is {each.dtype}, expected {one.dtype}")
        if each.numel() != one.numel():
            raise ValueError(
                f"{operation}: {argument}[{index}] has {each.numel()} elements, expected {one.numel()}"
            )


class Staging:
    """Memory for what has to be laid out otherwise on its way, kept because fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def take(self, size: int) -> torch.Tensor:
        """At least ``size`` bytes, the caller's until they are given back."""
        kept, self._kept = self._kept, None
        if kept is None or kept.numel() < size:
            kept = torch.empty(size, dtype=torch.uint8)
        return kept

    def give(self, memory: torch.Tensor) -> None:
        """Back, for the next call."""
        if memory.numel() <= KEPT_BYTES:
            self._kept = memory
