"""All ranks of a host in one process and one launch: fused collectives without a second GPU, or without any.

Tensors on a CUDA device run the kernels there, tensors on the CPU the same source in an emulator. Results, residuals
included, are those of as many processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm import _C
from dtcomm.codecs import Codec, codec
from dtcomm.errors import PeerLost
from dtcomm.runtime.fused import (
    BUDGET_NS,
    SLOT_BYTES,
    Emulated,
    FusedPlan,
    FusedRanks,
    Launcher,
    OnDevice,
    Room,
)
from dtcomm.runtime.seats import blocks_of
from dtcomm.runtime.shape import Part, Shape
from dtcomm.runtime.shm import Buffers

EMULATED_BLOCKS = 2


class VirtualRanks:
    """``ranks`` ranks on one device, with memory of their own that is kept from call to call.

    ``blocks`` are thread blocks of a rank, by default as many as run at once; ``order`` seeds the emulator's, which
    runs on the CPU, ``absent`` is a rank that never comes, there.
    """

    def __init__(
        self,
        ranks: int,
        device: torch.device | str = "cpu",
        *,
        blocks: int = 0,
        slot_bytes: int = SLOT_BYTES,
        budget_ns: int = BUDGET_NS,
        order: int = 0,
        absent: int = -1,
    ) -> None:
        device = torch.device(device)
        if not 2 <= ranks <= _C.MOST_RANKS:
            raise ValueError(f"ranks: expected 2 to {_C.MOST_RANKS}, got {ranks}")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda, got {device}")
        launcher: Launcher
        if device.type == "cuda":
            blocks = blocks or blocks_of(device, ranks)
            launcher = OnDevice(device)
        else:
            blocks = blocks or EMULATED_BLOCKS
            launcher = Emulated(order, absent)
        self.ranks, self.device = ranks, device
        room = Room(blocks, slot_bytes)
        size = _C.fused_bytes(ranks, room)
        self._memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
        pads = [memory[_C.MISSING_OFFSET :][:4].view(torch.int32) for memory in self._memory]
        addresses = [memory.data_ptr() for memory in self._memory]
        self.fused = FusedRanks(launcher, room, addresses, pads, 0, ranks, budget_ns)

    def plan(
        self,
        collective: str,
        numel: int,
        dtype: torch.dtype,
        spec: str | Codec,
        *,
        algorithm: str = "one_shot",
        op: str = "sum",
        splits: tuple[int, ...] = (),
    ) -> FusedPlan:
        """A call of one shape, to be run again and again; ``numel`` is of the tensor or of one shard."""
        part = Part(numel, dtype, codec(spec))
        return self.fused.prepare(Shape(collective, op, (part,), algorithm, splits=splits))

    def run(
        self,
        plan: FusedPlan,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Queue it for all ranks; nothing is waited for on a device, and a graph may capture it."""
        losses = [None] * self.ranks if residuals is None else residuals
        given = [[Buffers(*each)] for each in zip(inputs, outputs, losses, strict=True)]
        self.fused.launch(plan, given)

    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: str = "sum",
        *,
        codec: str | Codec = "none",
        algorithm: str = "two_shot",
        residuals: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Reduce the ranks' tensors in place; ``check`` says whether all came."""
        first = tensors[0]
        plan = self.plan("all_reduce", first.numel(), first.dtype, codec, algorithm=algorithm, op=op)
        self.run(plan, tensors, tensors, residuals)

    def check(self) -> None:
        """Wait for the device; PeerLost where a rank missed another one."""
        for rank, pad in enumerate(self.fused.pads):
            missing = int(pad)
            if missing:
                raise PeerLost(f"rank {missing - 1} did not come in time, says rank {rank}")
