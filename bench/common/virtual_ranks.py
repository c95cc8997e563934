"""Several ranks in one process, for tests and benchmarks.

`run_simulated` steps the native interpreters of all ranks in one thread, in a seeded order with delays, crashes and
bit flips. Nothing blocks or forks, so that thousands of interleavings run per second and a failing seed reproduces the
failure.

`VirtualRanks` runs all ranks of a fused collective in one kernel launch. CUDA tensors run the kernels on their device;
CPU tensors run the same source in an emulator. Results and residuals are equal, bit for bit, to those of separate
processes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtcomm import _C
from dtcomm.codecs import Codec, codec
from dtcomm.errors import PeerLost
from dtcomm.runtime.cuda_peer.launch import (
    SLOT_BYTES,
    TIMEOUT_NS,
    CudaLauncher,
    EmulatorLauncher,
    FusedEpilogue,
    FusedPlan,
    FusedRanks,
    Launcher,
    PeerBufferLayout,
    blocks_of,
)
from dtcomm.runtime.native import native_plan
from dtcomm.runtime.native.copy_policy import can_use_single_copy
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks, OpSpec, TensorSpec
from dtcomm.schedule import Schedule

STATUSES = ("done", "died", "peer_lost", "mismatch", "stuck", "corrupt")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective of one rank.

    Attributes:
        shared: Whether its tensors count as shared memory.
        single_copy: Whether peers may read its tensors in place.
        variants: How it is carried out and what is tried; None: pieces of the simulation's size, nothing is tried.
        hooks: Local steps before and after it.
    """

    shape: OpSpec
    schedule: Schedule
    buffers: Sequence[Buffers]
    seed: int = 0
    shared: bool = False
    single_copy: bool = False
    variants: _C.Variants | None = None
    hooks: OpHooks = NO_HOOKS


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """How `run_simulated` steps the ranks, in an order that ``seed`` decides.

    Attributes:
        delay: Probability that a rank does not see a peer's next published payload yet.
        crash_rank: Rank that dies after ``crash_after`` steps; None for none.
        corrupt_payload: Index of the published payload in which a bit is flipped; None for none.
        piece_bytes: Size of a piece; small, so that small tensors are cut into many pieces.
    """

    ranks: int
    seed: int
    delay: float = 0.5
    crash_rank: int | None = None
    crash_after: int = 0
    corrupt_payload: int | None = None
    piece_bytes: int = 4096
    slot_bytes: int = field(default=64 * 1024)


@dataclass(frozen=True, kw_only=True)
class SimulatedOutcome:
    """How a rank ended: one of ``STATUSES``, the rank it blames, completed operations and bytes sent.

    ``choices`` are what its tuner has chosen, by size class; the tuner's clock counts the steps of the simulation.
    """

    status: str
    failed_rank: int
    finished: int
    wire_bytes: int
    choices: list[dict[str, Any]]


def run_simulated(
    simulation: Simulation, operations: Sequence[Sequence[Operation]]
) -> list[SimulatedOutcome]:
    """Run ``operations[rank]`` in order on every rank; ranks run ahead of each other as far as the engine allows."""
    calls: list[list[Any]] = []
    for rank, rank_operations in enumerate(operations):
        calls.append([])
        for operation in rank_operations:
            shape = operation.shape
            single_copy = operation.single_copy and can_use_single_copy(shape)
            variants = operation.variants or _C.Variants(
                piece_bytes=simulation.piece_bytes, single_copy=single_copy
            )
            plan = _native_plan(
                shape,
                operation.schedule,
                rank,
                variants,
                simulation.slot_bytes,
            )
            pointers = [buffers.pointers() for buffers in operation.buffers]
            calls[rank].append((plan, pointers, operation.seed, operation.shared, *operation.hooks.native()))
    outcomes = _C.run_simulated(
        ranks=simulation.ranks,
        seed=simulation.seed,
        max_boxes=max(
            (plan.max_boxes for rank_operations in calls for plan, *_ in rank_operations), default=1
        ),
        slot_bytes=simulation.slot_bytes,
        delay=simulation.delay,
        crash_rank=-1 if simulation.crash_rank is None else simulation.crash_rank,
        crash_after=simulation.crash_after,
        flip_box=-1 if simulation.corrupt_payload is None else simulation.corrupt_payload,
        calls=calls,
    )
    return [
        SimulatedOutcome(
            status=STATUSES[status],
            failed_rank=failed_rank,
            finished=finished,
            wire_bytes=wire_bytes,
            choices=choices,
        )
        for status, failed_rank, finished, wire_bytes, choices in outcomes
    ]


_native_plan = functools.lru_cache(maxsize=4096)(native_plan)


EMULATED_BLOCKS = 2


class VirtualRanks:
    """Several ranks on a CUDA device, or on ``"cpu"`` in the emulator, with buffers that are kept from call to call.

    Args:
        blocks: Thread blocks of a rank; 0 takes as many as run concurrently.
        slot_bytes: Bytes for the payload of a section.
        timeout_ns: Nanoseconds a kernel waits for a peer before it reports the peer missing.
        seed: Seed of the order in which the emulator runs threads.
        absent: A rank that never starts, in the emulator; -1 for none.
    """

    def __init__(
        self,
        ranks: int,
        device: torch.device | str = "cpu",
        *,
        blocks: int = 0,
        slot_bytes: int = SLOT_BYTES,
        timeout_ns: int = TIMEOUT_NS,
        seed: int = 0,
        absent: int = -1,
    ) -> None:
        device = torch.device(device)
        if not 2 <= ranks <= _C.MAX_RANKS:
            raise ValueError(f"ranks: expected 2 to {_C.MAX_RANKS}, got {ranks}")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda, got {device}")
        launcher: Launcher
        if device.type == "cuda":
            blocks = blocks or blocks_of(device, ranks)
            launcher = CudaLauncher(device)
        else:
            blocks = blocks or EMULATED_BLOCKS
            launcher = EmulatorLauncher(seed, absent)
        self.ranks, self.device = ranks, device
        layout = PeerBufferLayout(blocks, slot_bytes)
        size = _C.fused_bytes(ranks, layout)
        self._memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
        pads = [memory[_C.MISSING_OFFSET :][:4].view(torch.int32) for memory in self._memory]
        addresses = [memory.data_ptr() for memory in self._memory]
        self.fused = FusedRanks(launcher, layout, addresses, pads, 0, ranks, timeout_ns)

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
        """Prepare a call of one shape, which `run` can repeat; ``numel`` are elements of the tensor or of one shard."""
        shape = OpSpec(collective, op, (TensorSpec(numel, dtype, codec(spec)),), algorithm, splits=splits)
        return self.fused.prepare(shape)

    def run(
        self,
        plan: FusedPlan,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
        residuals: Sequence[torch.Tensor | None] | None = None,
        epilogues: Sequence[FusedEpilogue] = (),
    ) -> None:
        """Queue the call for all ranks without blocking the host; a CUDA graph can capture it.

        ``epilogues`` holds the fused epilogue of each rank.
        """
        losses = [None] * self.ranks if residuals is None else residuals
        buffers = [[Buffers(*tensors)] for tensors in zip(inputs, outputs, losses, strict=True)]
        self.fused.launch(plan, buffers, epilogues)

    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: str = "sum",
        *,
        codec: str | Codec = "none",
        algorithm: str = "two_shot",
        residuals: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Reduce the ranks' tensors in place; `check` raises if a rank was missing."""
        first = tensors[0]
        plan = self.plan("all_reduce", first.numel(), first.dtype, codec, algorithm=algorithm, op=op)
        self.run(plan, tensors, tensors, residuals)

    def check(self) -> None:
        """Wait for the device and raise PeerLost if a rank missed a peer."""
        for rank, pad in enumerate(self.fused.pads):
            missing = int(pad)
            if missing:
                raise PeerLost(f"rank {missing - 1} did not arrive in time, reported by rank {rank}")
