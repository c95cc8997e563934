"""Reductions that need a preparation collective before the sum: the base class, and the carving of scratch memory.

Such a codec makes the contributions of all ranks comparable first (shared exponents, or shared random positions), so
that the messages add them without loss. The call consists of one or more ordinary operations (*stages*), each with a
schedule and a codec of its own, and of tasks that every rank runs before and after them. The stages of one call are
queued together, so that no other operation comes between them, asynchronous or not.

`_reproducible_sum` and `_shared_randk_sum` implement the two codecs; `_dispatch` makes and starts the plans.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dtcomm.runtime.types import Buffers, OpHooks, OpSpec

ALIGNMENT = 64
ScratchSize = tuple[int, torch.dtype]  # elements and their type
Scratch = Callable[[int], torch.Tensor]  # returns at least that many bytes
PrepareStage = Callable[[OpSpec], Any]  # returns the runtime's plan of a stage
Check = Callable[[], None]


class Stage(NamedTuple):
    """One operation of a call."""

    plan: Any
    buffers: Sequence[Buffers]
    hooks: OpHooks


class MultiStagePlan(abc.ABC):
    """The plan of a reduction whose ranks agree on a representation before they add."""

    @abc.abstractmethod
    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        """Return the operations of a call, and a function to call when they are done, which may raise."""


class SplitPlan(MultiStagePlan):
    """A plan for parts that need different plans: ``plans`` are (indices of the parts, their plan)."""

    def __init__(self, plans: Sequence[tuple[Sequence[int], MultiStagePlan]]) -> None:
        self._plans = plans

    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        stages: list[Stage] = []
        for indices, plan in self._plans:
            stages += plan.stages([buffers[i] for i in indices], seed, scratch)[0]
        return stages, None


def carve(scratch: Scratch, sizes: Sequence[ScratchSize]) -> list[torch.Tensor]:
    """Return a tensor for each of ``sizes``, one behind the other in the communicator's scratch memory."""
    nbytes = [-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, dtype in sizes]
    memory, offset, tensors = scratch(sum(nbytes)), 0, []
    for (count, dtype), padded in zip(sizes, nbytes, strict=True):
        tensors.append(memory[offset : offset + count * dtype.itemsize].view(dtype))
        offset += padded
    return tensors


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as one dimension in memory order, whatever its strides."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def shards(tensor: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    """Return ``count`` equal parts of a tensor; None for each if there is no tensor."""
    if tensor is None:
        return [None] * count
    numel = tensor.numel() // count
    return [flat(tensor)[i * numel : (i + 1) * numel] for i in range(count)]
