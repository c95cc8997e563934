"""All ranks of a host in one process and one launch: fused collectives without a second GPU, or without any.

Tensors on a CUDA device run the kernels there, tensors on the CPU the same source in an emulator. Results, residuals
included, are those of as many processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm import _C, algorithms
from dtcomm.codecs import Codec, codec
from dtcomm.errors import PeerLost
from dtcomm.runtime.bootstrap.gpu_topology import blocks_of
from dtcomm.runtime.cuda_peer.launch import (
    BOX_BYTES,
    BUDGET_NS,
    SLOT_BYTES,
    After,
    Emulated,
    FusedPlan,
    FusedRanks,
    Launcher,
    OnDevice,
    Room,
)
from dtcomm.runtime.native.runtime import Buffers
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, Part, Shape
from dtcomm.schedule import Schedule

EMULATED_BLOCKS = 2
EMULATED_BOX_BYTES = 2**20


class VirtualRanks:
    """``ranks`` ranks on one device, with memory of their own that is kept from call to call.

    ``blocks`` are thread blocks of a rank, by default as many as run at once; ``slot_bytes`` and ``box_bytes`` are room
    for payloads of direct algorithms and of programs. ``order`` seeds the emulator's, which runs on the CPU, ``absent``
    is a rank that never comes, there.
    """

    def __init__(
        self,
        ranks: int,
        device: torch.device | str = "cpu",
        *,
        blocks: int = 0,
        slot_bytes: int = SLOT_BYTES,
        box_bytes: int = 0,
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
            blocks, box_bytes = blocks or blocks_of(device, ranks), box_bytes or BOX_BYTES
            launcher = OnDevice(device)
        else:
            blocks, box_bytes = blocks or EMULATED_BLOCKS, box_bytes or EMULATED_BOX_BYTES
            launcher = Emulated(order, absent)
        self.ranks, self.device = ranks, device
        room = Room(blocks, slot_bytes, box_bytes)
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
        root: int = 0,
        splits: tuple[int, ...] = (),
        schedule: Schedule | None = None,
    ) -> FusedPlan:
        """A call of one shape, to be run again and again; ``numel`` is of the tensor or of one shard. ``algorithm``: a
        name of ``dtcomm.algorithms``, or anything where a ``schedule`` of one's own is given.
        """
        shape = Shape(collective, op, (Part(numel, dtype, codec(spec)),), algorithm, root, splits)
        if schedule is None and algorithm != TWO_SHOT_SYMMETRIC:
            schedule = algorithms.build(algorithm, collective, self.ranks, root)
        return self.fused.prepare(shape, schedule)

    def run(
        self,
        plan: FusedPlan,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
        residuals: Sequence[torch.Tensor | None] | None = None,
        after: Sequence[After] = (),
    ) -> None:
        """Queue it for all ranks; nothing is waited for on a device, and a graph may capture it. None: a rank that has
        no such tensor, as under a root; ``after``: what each adds to its sum.
        """
        losses = [None] * self.ranks if residuals is None else residuals
        given = [[Buffers(*each)] for each in zip(inputs, outputs, losses, strict=True)]
        self.fused.launch(plan, given, after)

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
