"""The buffers that FSDP's collectives allocate in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm import torch_compat
from dtcomm.collectives import empty

# Smaller buffers cost more, in whole pages and a file descriptor, than they save.
MIN_SHARED_BYTES = 64 * 1024


class BufferPool:
    """The buffers that FSDP allocates in every step: shared tensors, reused once nothing else refers to their storage.

    A collective whose tensors lie in memory that the ranks of a host share needs no staging copy. And for tens of
    megabytes, the page faults of a fresh allocation cost more than moving the data.

    Attributes:
        unshared_reason: Why ordinary memory is used, after an allocation of shared memory failed; otherwise empty.
    """

    def __init__(self) -> None:
        # Buffers, each with the number of references to its storage when it is free.
        self._buffers: list[tuple[torch.Tensor, int]] = []
        self.unshared_reason = ""

    def take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor; small ones, and those on devices, are in ordinary memory."""
        shape = torch.Size(size)
        nbytes = shape.numel() * dtype.itemsize
        if device.type != "cpu" or nbytes < MIN_SHARED_BYTES or self.unshared_reason:
            return torch.empty(shape, dtype=dtype, device=device)
        for buffer, unused_count in self._buffers:
            if buffer.numel() == nbytes and _use_count(buffer) <= unused_count:
                return buffer.view(dtype).view(shape)
        try:
            buffer = empty(nbytes, dtype=torch.uint8)
        except OSError as error:
            self.unshared_reason = f"buffers are not in shared memory: {error}"
            return torch.empty(shape, dtype=dtype, device=device)
        self._buffers.append((buffer, _use_count(buffer)))
        return buffer.view(dtype).view(shape)

    def nbytes(self) -> int:
        """Return the size of all buffers, used or not."""
        return sum(buffer.numel() for buffer, _ in self._buffers)

    def trim(self) -> None:
        """Free the buffers that are not in use."""
        self._buffers = [(buffer, count) for buffer, count in self._buffers if _use_count(buffer) > count]


def _use_count(tensor: torch.Tensor) -> int:
    """Return the number of tensors, in Python and in autograd, that refer to the storage."""
    return torch_compat.storage_use_count(tensor)
