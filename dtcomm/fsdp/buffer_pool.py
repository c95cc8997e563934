"""Buffers that FSDP asks for again and again, in memory that the ranks of a host share.

A collective whose tensors all lie there needs no staging copy; and at tens of megabytes asking the system for new
memory costs more, by page faults, than moving what goes into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.collectives import empty

LEAST = 64 * 1024  # bytes: below it whole pages and a file descriptor each cost more than they save


class Pool:
    """Shared tensors that are handed out again once nobody holds a view of them.

    ``why`` says why ordinary memory was used, where the machine had no more to share.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, int]] = []  # with how many held its memory when it was made
        self.why = ""

    def take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor with whatever was in it; ordinary memory on other devices than the CPU."""
        shape = torch.Size(size)
        wanted = shape.numel() * dtype.itemsize
        if device.type != "cpu" or wanted < LEAST or self.why:
            return torch.empty(shape, dtype=dtype, device=device)
        for tensor, alone in self._kept:
            if tensor.numel() == wanted and _holders(tensor) <= alone:
                return tensor.view(dtype).view(shape)
        try:
            fresh = empty(wanted, dtype=torch.uint8)
        except OSError as error:
            self.why = f"buffers are not in shared memory: {error}"
            return torch.empty(shape, dtype=dtype, device=device)
        self._kept.append((fresh, _holders(fresh)))
        return fresh.view(dtype).view(shape)

    def nbytes(self) -> int:
        """Of all, in use or not."""
        return sum(tensor.numel() for tensor, _ in self._kept)

    def trim(self) -> None:
        """Give back what nobody uses."""
        self._kept = [(tensor, alone) for tensor, alone in self._kept if _holders(tensor) > alone]


def _holders(tensor: torch.Tensor) -> int:
    """How many hold its memory: tensors in Python and within autograd."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
