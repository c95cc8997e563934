"""The caller of the fused kernels: a collective inside a host over memory that all its ranks reach, as one launch, or,
for a lowered schedule (ring, tree, one's own), as one a step.

The same code serves one rank of many processes, all ranks as virtual ones on one device, and all ranks on the CPU,
where an emulator runs the kernels' source. docs/how-it-works/gpu-status.md says what the kernels do,
csrc/cuda/fused/collective.h what a call is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dtcomm import _C
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels.types import OPERATIONS
from dtcomm.runtime.cuda_peer.programs import Lowered, lowered
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, Buffers, OpSpec, TensorSpec
from dtcomm.schedule import Schedule
from dtcomm.schedule.ir import REDUCING

COLLECTIVES = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 2, "all_to_all": 3}
ALGORITHMS = {"two_shot": 0, "one_shot": 1, TWO_SHOT_SYMMETRIC: 0}
PROGRAM = 2
MOST_RANKS: int = _C.MOST_RANKS
SLOT_BYTES = 32 * 1024  # of a section's payload: enough to fill a link while the next one is made
BOX_BYTES = 32 * 2**20  # for the payloads of a program's piece: tens of megabytes go in one
BUDGET_NS = 10 * 10**9

Shares = list[tuple[int, int, int, int, int]]


class Room(NamedTuple):
    """How the memory that ranks reach is laid out: the same on all of them."""

    blocks: int
    slot_bytes: int = SLOT_BYTES
    box_bytes: int = 0


def room_of(seats: Sequence[dict[str, Any]]) -> Room:
    """Where the ranks' devices are what ``seats`` says of them: of a size that does not depend on the tensors."""
    return Room(min(seat["blocks"] for seat in seats), SLOT_BYTES, BOX_BYTES)


class Launcher(Protocol):
    """Where kernels run: a device, or the emulator."""

    def state(self, **stated: Any) -> Any:
        """A call of one shape; keywords as ``FusedCall`` takes them."""

    def why_not(self, stated: Any) -> str:
        """Why there is no kernel for it; empty where there is one."""

    def launch(self, stated: Any, shares: Shares, features: int = 0) -> None:
        """Run it with these tensors, behind what the current stream was given; ``features`` are those of a bias."""


class Emulated:
    """On the CPU, all ranks in one process. ``order`` seeds that of the lanes' turns; ``absent`` never comes."""

    def __init__(self, order: int = 0, absent: int = -1) -> None:
        self.order = order
        self.absent = absent

    def state(self, **stated: Any) -> Any:
        try:
            from dtcomm import _emulator
        except ImportError:
            raise RuntimeError(
                "the module dtcomm._emulator was not built; build it from a checkout: "
                "DTCOMM_EMULATOR=1 pip install --no-build-isolation ."
            ) from None
        return _emulator.FusedCall(**stated)

    def why_not(self, stated: Any) -> str:
        return str(stated.why_not())

    def launch(self, stated: Any, shares: Shares, features: int = 0) -> None:
        stated.launch(shares, self.order, self.absent, features)
        self.order += 1


class OnDevice:
    """On the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state(self, **stated: Any) -> Any:
        from dtcomm import _cuda

        return _cuda.FusedCall(**stated)

    def why_not(self, stated: Any) -> str:
        return str(stated.why_not())

    def launch(self, stated: Any, shares: Shares, features: int = 0) -> None:
        with torch.cuda.device(self._device):
            stated.launch(shares, torch.cuda.current_stream(self._device).cuda_stream, features)


def launcher_of(device: torch.device) -> Launcher:
    """What runs kernels on tensors of the device."""
    return OnDevice(device) if device.type == "cuda" else Emulated()


class NoKernel(ValueError):
    """There is no fused kernel for calls of a shape; the message says why."""


class Launch(NamedTuple):
    """One part of a message, stated."""

    part: int
    call: Any


class FusedPlan(NamedTuple):
    """A call of one shape: a launch, or a program's, for each of its parts that has elements."""

    spec: OpSpec
    text: str
    launches: tuple[Launch, ...]
    sent_bytes: int

    @property
    def finishes(self) -> bool:
        """Whether its kernel adds what an ``After`` says."""
        return self.spec.collective == "all_reduce" and self.spec.algorithm in ALGORITHMS


class After(NamedTuple):
    """What a rank adds to a sum, in the pass that writes it: bias [features], addend as the tensor."""

    bias: torch.Tensor | None
    addend: torch.Tensor | None

    @property
    def features(self) -> int:
        """Of the bias."""
        return 0 if self.bias is None else self.bias.numel()

    def pointers(self) -> tuple[int, int]:
        """Addresses, 0 for what is not there."""
        return (
            0 if self.bias is None else self.bias.data_ptr(),
            0 if self.addend is None else self.addend.data_ptr(),
        )


NOTHING_AFTER = After(None, None)


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

    def prepare(self, shape: OpSpec, schedule: Schedule | None = None) -> FusedPlan:
        """A plan for calls of this shape; ``schedule`` is needed where its algorithm is none of ``ALGORITHMS``.

        NoKernel says why there is none, on all ranks alike.
        """
        reason = why_not(shape, self.ranks, schedule)
        if reason:
            raise NoKernel(reason)
        program = None if _direct(shape) or schedule is None else lowered(schedule)
        launches = []
        for index, part in enumerate(shape.parts):
            if part.numel:
                launches.append(Launch(index, self._state(shape, part, program)))
                reason = self._launcher.why_not(launches[-1].call)
                if reason:
                    raise NoKernel(f"{shape.algorithm} has no fused kernel: {reason}")
        if program is not None:
            sent = program.sent(shape, self.first)
        else:
            sent = sum(self._sent(shape, part) for part in shape.parts)
        return FusedPlan(shape, str(shape), tuple(launches), sent)

    def set_budget(self, seconds: float) -> None:
        """How long kernels of the plans from now on wait for one signal."""
        self._budget_ns = int(seconds * 1e9)

    def launch(
        self, plan: FusedPlan, given: Sequence[Sequence[Buffers]], after: Sequence[After] = ()
    ) -> None:
        """Queue a call; ``given[i]`` are the parts of rank ``first + i``, ``after[i]`` what it adds to its sum (where
        the plan ``finishes`` and has one part).
        """
        last = after or [NOTHING_AFTER] * len(given)
        for at, call in plan.launches:
            shares = [
                (*buffers[at].pointers(), *each.pointers()) for buffers, each in zip(given, last, strict=True)
            ]
            self._launcher.launch(call, shares, last[0].features)

    def _state(self, shape: OpSpec, part: TensorSpec, program: Lowered | None) -> Any:
        granule = part.codec.granularity
        if program is not None:
            special = {"algorithm": PROGRAM, **program.stated(shape, self.first, self.here)}
            blocks, section = max(1, program.granules(shape, part)), 0
        else:
            special = {"algorithm": ALGORITHMS[shape.algorithm], "collective": COLLECTIVES[shape.collective]}
            granules = -(-(max(shape.splits) if shape.splits else part.numel) // granule)
            if shape.collective == "all_reduce" and shape.algorithm != "one_shot":
                granules = -(-granules // self.ranks)
            most = self.room.slot_bytes // part.codec.wire_bytes(granule, part.dtype)
            section = min(most, max(1, -(-granules // self.room.blocks)))
            blocks = -(-granules // section)
        return self._launcher.state(
            codec=part.codec.native(),
            dtype=ELEMENT_TYPES[part.dtype],
            numel=part.numel,
            splits=list(shape.splits),
            op=OPERATIONS["sum" if shape.op == "avg" else shape.op],
            divisor=self.ranks if shape.op == "avg" else 1,
            encodes_own=shape.algorithm == TWO_SHOT_SYMMETRIC,
            rounds=shape.algorithm != TWO_SHOT_SYMMETRIC,
            ranks=self.ranks,
            first=self.first,
            here=self.here,
            room=self.room,
            blocks=min(self.room.blocks, blocks),
            section=section,
            budget=self._budget_ns,
            memory=self._memory,
            **special,
        )

    def _sent(self, shape: OpSpec, part: TensorSpec) -> int:
        """Bytes that the first rank here puts into peers' memory."""
        mine, ranks, granule = self.first, self.ranks, part.codec.granularity

        def bytes_of(numel: int) -> int:
            return part.codec.wire_bytes(numel, part.dtype)

        if shape.splits:
            row = shape.splits[mine * ranks : (mine + 1) * ranks]
            return sum(bytes_of(count) for peer, count in enumerate(row) if peer != mine)
        if shape.collective != "all_reduce" or shape.algorithm == "one_shot":
            return bytes_of(part.numel) * (ranks - 1)
        granules = -(-part.numel // granule)
        cuts = [min(part.numel, granules * rank // ranks * granule) for rank in range(ranks + 1)]
        chunks = [bytes_of(stop - start) for start, stop in itertools.pairwise(cuts)]
        return sum(chunks) - chunks[mine] + chunks[mine] * (ranks - 1)


def why_not(shape: OpSpec, ranks: int, schedule: Schedule | None = None) -> str:
    """Why there is no fused kernel for calls of this shape; empty where there is one, but for what a device's memory
    has no room for. ``schedule``: what is run where there is no direct kernel.
    """
    if not 2 <= ranks <= MOST_RANKS:
        return f"{ranks} ranks: fused kernels serve 2 to {MOST_RANKS}"
    direct = _direct(shape)
    if not direct and (schedule is None or shape.algorithm == TWO_SHOT_SYMMETRIC):
        return f"{shape.algorithm} has no fused kernel of {shape.collective}"
    if shape.algorithm == "send":
        return "send has no fused kernel: what waits for a message would hold multiprocessors"
    if shape.checksum:
        return "payloads of fused kernels carry no checksum"
    moved = shape.collective in ("all_gather", "all_to_all") if direct else shape.collective not in REDUCING
    for part in shape.parts:
        codec = part.codec
        if part.between is not None and part.between != codec and not _inside(part, direct, schedule):
            return f"codec {part.spec}: fused kernels stay inside one host"
        moves = moved and codec.name == "none"
        if not moves and not _C.fusible(codec.native(), ELEMENT_TYPES[part.dtype]):
            dtype = str(part.dtype).removeprefix("torch.")
            return f"codec {part.spec} of {dtype} has no fused kernel"
    return ""


def _direct(shape: OpSpec) -> bool:
    """Whether it is one launch of its own."""
    if shape.algorithm not in ALGORITHMS or shape.collective not in COLLECTIVES:
        return False
    return shape.algorithm == "one_shot" or shape.collective == "all_reduce"


def _inside(part: TensorSpec, direct: bool, schedule: Schedule | None) -> bool:
    """Whether nothing of the part travels in the codec of another level, which cuts it at the same granules."""
    levels = schedule is not None and any(transfer.level for transfer in schedule.transfers)
    return part.granularity == part.codec.granularity and (direct or not levels)
