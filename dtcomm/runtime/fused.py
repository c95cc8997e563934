"""The caller of the fused kernels: a collective inside a host as one launch over memory that all its ranks reach.

The same code serves one rank of many processes, all ranks as virtual ones on one device, and all ranks on the CPU,
where an emulator runs the kernels' source. docs/gpu.md says what the kernels do; csrc/cuda/fused.h what a call is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dtcomm import _C
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels.call import OPERATIONS
from dtcomm.runtime.shape import Part, Shape
from dtcomm.runtime.shm import Buffers

COLLECTIVES = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 2, "all_to_all": 3}
ALGORITHMS = {"two_shot": 0, "one_shot": 1}
MOST_RANKS: int = _C.MOST_RANKS
SLOT_BYTES = 32 * 1024  # of a section's payload: enough to fill a link while the next one is made
BUDGET_NS = 10 * 10**9

Shares = list[tuple[int, int, int, int, int]]


class Room(NamedTuple):
    """How the memory that ranks reach is laid out: the same on all of them."""

    blocks: int
    slot_bytes: int = SLOT_BYTES
    box_bytes: int = 0


class Launcher(Protocol):
    """Where kernels run: a device, or the emulator."""

    def state(self, **stated: Any) -> Any:
        """A call of one shape; keywords as ``FusedCall`` takes them."""

    def launch(self, stated: Any, shares: Shares) -> None:
        """Run it with these tensors, behind what the current stream was given."""


class Emulated:
    """On the CPU, all ranks in one process. ``order`` seeds that of the lanes' turns; ``absent`` never comes."""

    def __init__(self, order: int = 0, absent: int = -1) -> None:
        self.order = order
        self.absent = absent

    def state(self, **stated: Any) -> Any:
        return _C.FusedCall(**stated)

    def launch(self, stated: Any, shares: Shares) -> None:
        stated.launch(shares, self.order, self.absent)
        self.order += 1


class OnDevice:
    """On the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state(self, **stated: Any) -> Any:
        from dtcomm import _cuda

        return _cuda.FusedCall(**stated)

    def launch(self, stated: Any, shares: Shares) -> None:
        with torch.cuda.device(self._device):
            stated.launch(shares, torch.cuda.current_stream(self._device).cuda_stream)


def launcher_of(device: torch.device) -> Launcher:
    """What runs kernels on tensors of the device."""
    return OnDevice(device) if device.type == "cuda" else Emulated()


class Launch(NamedTuple):
    """One part of a message, stated."""

    part: int
    call: Any


class FusedPlan(NamedTuple):
    """A call of one shape: a launch for each of its parts that has elements."""

    shape: Shape
    text: str
    launches: tuple[Launch, ...]
    sent_bytes: int


class FusedRanks:
    """Ranks ``first`` .. ``first + here - 1`` of ``ranks``, whose memories begin at the addresses ``memory``.

    ``pads`` are the int32 words, one for each rank that is here, in which the kernels leave who did not come.
    """

    def __init__(
        self,
        launcher: Launcher,
        room: Room,
        memory: Sequence[int],
        pads: Sequence[torch.Tensor],
        first: int,
        here: int,
        budget_ns: int = BUDGET_NS,
    ) -> None:
        self.ranks, self.first, self.here = len(memory), first, here
        self.room = room
        self.pads = pads
        self._launcher = launcher
        self._memory = list(memory)
        self._budget_ns = budget_ns

    def prepare(self, shape: Shape) -> FusedPlan:
        """ValueError where there is no kernel: ask ``why_not`` before."""
        reason = why_not(shape, self.ranks)
        if reason:
            raise ValueError(reason)
        launches = tuple(
            Launch(index, self._state(shape, part)) for index, part in enumerate(shape.parts) if part.numel
        )
        return FusedPlan(shape, str(shape), launches, sum(self._sent(shape, part) for part in shape.parts))

    def set_budget(self, seconds: float) -> None:
        """How long kernels of the plans from now on wait for one signal."""
        self._budget_ns = int(seconds * 1e9)

    def launch(self, plan: FusedPlan, given: Sequence[Sequence[Buffers]]) -> None:
        """Queue a call; ``given[i]`` are the parts of rank ``first + i``."""
        for at, call in plan.launches:
            self._launcher.launch(call, [(*buffers[at].pointers(), 0, 0) for buffers in given])

    def _state(self, shape: Shape, part: Part) -> Any:
        granule = part.codec.granularity
        largest = max(shape.splits) if shape.splits else part.numel
        granules = -(-largest // granule)
        if shape.collective == "all_reduce" and shape.algorithm == "two_shot":
            granules = -(-granules // self.ranks)
        most = self.room.slot_bytes // part.codec.wire_bytes(granule, part.dtype)
        section = min(most, max(1, -(-granules // self.room.blocks)))
        return self._launcher.state(
            collective=COLLECTIVES[shape.collective],
            algorithm=ALGORITHMS[shape.algorithm],
            codec=part.codec.native(),
            dtype=ELEMENT_TYPES[part.dtype],
            numel=part.numel,
            splits=list(shape.splits),
            op=OPERATIONS["sum" if shape.op == "avg" else shape.op],
            divisor=self.ranks if shape.op == "avg" else 1,
            features=0,
            encodes_own=False,
            ranks=self.ranks,
            first=self.first,
            here=self.here,
            room=self.room,
            blocks=min(self.room.blocks, -(-granules // section)),
            section=section,
            budget=self._budget_ns,
            memory=self._memory,
        )

    def _sent(self, shape: Shape, part: Part) -> int:
        """Bytes that the first rank here puts into peers' memory."""
        whole = part.codec.wire_bytes(part.numel, part.dtype)
        if shape.collective == "all_reduce":
            return (
                2 * whole * (self.ranks - 1) // self.ranks
                if shape.algorithm == "two_shot"
                else whole * (self.ranks - 1)
            )
        if shape.splits:
            row = shape.splits[self.first * self.ranks : (self.first + 1) * self.ranks]
            return sum(
                part.codec.wire_bytes(count, part.dtype)
                for peer, count in enumerate(row)
                if peer != self.first
            )
        return whole * (self.ranks - 1)


def why_not(shape: Shape, ranks: int) -> str:
    """Why there is no fused kernel for calls of this shape; empty where there is one."""
    if not 2 <= ranks <= MOST_RANKS:
        return f"{ranks} ranks: fused kernels serve 2 to {MOST_RANKS}"
    if shape.collective not in COLLECTIVES:
        return f"{shape.collective} has no fused kernel"
    if shape.algorithm not in ALGORITHMS or (shape.algorithm, shape.collective) in _NEITHER:
        return f"{shape.algorithm} has no fused kernel of {shape.collective}"
    if shape.checksum:
        return "payloads of fused kernels carry no checksum"
    for part in shape.parts:
        codec = part.codec
        if part.between is not None and part.between != codec:
            return f"codec {part.spec}: fused kernels stay inside one host"
        moves = shape.collective in ("all_gather", "all_to_all") and codec.name == "none"
        if not moves and not _C.fusible(codec.native(), ELEMENT_TYPES[part.dtype]):
            dtype = str(part.dtype).removeprefix("torch.")
            return f"codec {part.spec} of {dtype} has no fused kernel"
    return ""


_NEITHER = {("two_shot", name) for name in COLLECTIVES if name != "all_reduce"}
