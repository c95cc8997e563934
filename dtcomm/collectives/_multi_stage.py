"""Sums on common ground: what ranks add is made comparable first, so that the messages add it without loss.

Such a collective is one or more ordinary operations (a *stage* each, with a schedule and a codec of its own) and the
steps that every rank takes on its own before and after them. Stages of one call follow each other in the order of the
communicator's operations, so that nothing comes between them, asynchronous or not.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dtcomm.runtime.types import Buffers, OpHooks, TensorSpec

ALIGNMENT = 64
Room = tuple[int, torch.dtype]  # elements
Scratch = Callable[[int], torch.Tensor]  # memory of at least so many bytes


class Message(NamedTuple):
    """What a stage asks the runtime for: fields as in ``OpSpec``; ``algorithm`` is the caller's or a name."""

    collective: str
    op: str
    parts: tuple[TensorSpec, ...]
    algorithm: Any
    root: int
    purpose: str
    checksum: bool = False


class Stage(NamedTuple):
    """One operation of a call."""

    plan: Any
    buffers: Sequence[Buffers]
    hooks: OpHooks


Make = Callable[[Message], Any]
Check = Callable[[], None]


class MultiStagePlan(abc.ABC):
    """A collective of one shape whose terms are brought to common ground."""

    @abc.abstractmethod
    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        """The operations of a call, and what is to be called once they are done; it may raise."""


class Groups(MultiStagePlan):
    """Parts that need plans of their own: ``groups`` are (positions of the parts, their plan)."""

    def __init__(self, groups: Sequence[tuple[Sequence[int], MultiStagePlan]]) -> None:
        self._groups = groups

    def stages(
        self, buffers: Sequence[Buffers], seed: int, scratch: Scratch
    ) -> tuple[list[Stage], Check | None]:
        stages: list[Stage] = []
        for positions, plan in self._groups:
            stages += plan.stages([buffers[i] for i in positions], seed, scratch)[0]
        return stages, None


def carve(scratch: Scratch, rooms: Sequence[Room]) -> list[torch.Tensor]:
    """A tensor for each of ``rooms``, in memory that calls share."""
    sizes = [-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, dtype in rooms]
    memory, at, carved = scratch(sum(sizes)), 0, []
    for (count, dtype), size in zip(rooms, sizes, strict=True):
        carved.append(memory[at : at + count * dtype.itemsize].view(dtype))
        at += size
    return carved


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """In memory order, whatever the strides: the caller's tensors are dense."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def shards(tensor: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    """``count`` equal parts of a tensor, or of none."""
    if tensor is None:
        return [None] * count
    numel = tensor.numel() // count
    return [flat(tensor)[i * numel : (i + 1) * numel] for i in range(count)]
