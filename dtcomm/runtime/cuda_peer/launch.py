"""Plans and launches of fused CUDA collectives over memory that all ranks of a host reach.

A collective is one kernel launch. The same code serves one rank of several processes, all ranks as virtual ranks of one
device, and all ranks on the CPU, where the optional module ``dtcomm._emulator`` runs the kernels' source.
:class:`PeerRuntime` and ``bench.common.virtual_ranks`` call it. docs/how-it-works/gpu-status.md describes the
kernels, and csrc/cuda/fused/collective.h the kernel arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dtcomm import _C
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels.calls import OPERATIONS, address
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, Buffers, OpSpec, TensorSpec

#: Whether the fused kernels have run between several GPUs. Until then only DTCOMM_RUNTIME=peer uses them.
RAN_BETWEEN_GPUS = False

COLLECTIVES = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 2, "all_to_all": 3}
ALGORITHMS = {"two_shot": 0, "one_shot": 1, TWO_SHOT_SYMMETRIC: 0}
MAX_RANKS: int = _C.MAX_RANKS
SLOT_BYTES = 16 * 1024  # for a section's payload: enough to fill a link while the next section is encoded
TIMEOUT_NS = 10 * 10**9
BLOCKS_OF_A_MULTIPROCESSOR = 2  # the registers of a kernel allow two, and all its blocks must be resident

#: Addresses of a rank's input, output, residual, bias and addend; 0 where there is none.
RankPointers = tuple[int, int, int, int, int]
#: Launches a planned collective with the tensors of each local rank and the number of features of their bias.
LaunchFunction = Callable[[list[RankPointers], int], None]


class PeerBufferLayout(NamedTuple):
    """Layout of the memory that peers reach, the same on all ranks. Sizes in bytes."""

    blocks: int
    slot_bytes: int = SLOT_BYTES


def layout_for(gpus: Sequence[dict[str, Any]]) -> PeerBufferLayout:
    """The layout for ranks with these GPUs (``cuda_peer.memory.describe_gpu``); it does not depend on tensors."""
    return PeerBufferLayout(min(gpu["blocks"] for gpu in gpus))


def blocks_of(device: torch.device, ranks: int = 1) -> int:
    """The largest number of thread blocks per rank if ``ranks`` ranks share one launch on the device."""
    most = torch.cuda.get_device_properties(device).multi_processor_count * BLOCKS_OF_A_MULTIPROCESSOR
    return max(1, min(_C.MAX_BLOCKS, most // ranks))


def section_granules(granules: int, most: int, blocks: int) -> int:
    """How many granules of a chunk a thread block processes at a time: as many in its last turn as in the others.

    Sections as large as a slot would leave most blocks without work in the last turn.
    """
    turns = max(1, -(-granules // (most * blocks)))
    return max(1, -(-granules // (turns * blocks)))


class Launcher(Protocol):
    """Where kernels run: a CUDA device or the emulator."""

    def plan(self, **spec: Any) -> LaunchFunction:
        """Plan a collective of one shape; ``spec`` are the arguments of ``_cuda.FusedPlan``.

        The function that is returned launches it after the work already queued on the current stream. ValueError names
        the field for which there is no kernel.
        """


class EmulatorLauncher:
    """Runs kernels on the CPU, with all ranks in this process.

    ``seed`` decides the order in which the kernels' threads run; it grows by one with each launch. The kernels of the
    rank ``absent`` never start; -1 for none.
    """

    def __init__(self, seed: int = 0, absent: int = -1) -> None:
        self.seed = seed
        self.absent = absent

    def plan(self, **spec: Any) -> LaunchFunction:
        """Plan a collective for the emulator. Raises RuntimeError where the module ``_emulator`` was not built."""
        try:
            from dtcomm import _emulator
        except ImportError:
            raise RuntimeError(
                "the module dtcomm._emulator was not built; in a checkout `make emulator` builds it"
            ) from None
        plan = _emulator.FusedPlan(**spec)

        def launch(tensors: list[RankPointers], features: int) -> None:
            plan.launch(tensors, self.seed, self.absent, features)
            self.seed += 1

        return launch


class CudaLauncher:
    """Runs kernels on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, **spec: Any) -> LaunchFunction:
        """Plan a collective for the device."""
        from dtcomm import _cuda

        plan = _cuda.FusedPlan(**spec)

        def launch(tensors: list[RankPointers], features: int) -> None:
            with torch.cuda.device(self._device):
                plan.launch(tensors, torch.cuda.current_stream(self._device).cuda_stream, features)

        return launch


def launcher_for(device: torch.device) -> Launcher:
    """The launcher for tensors of ``device``."""
    return CudaLauncher(device) if device.type == "cuda" else EmulatorLauncher()


class NoFusedKernel(ValueError):
    """There is no fused kernel for calls of a shape; the message says why."""


class PartLaunch(NamedTuple):
    """The planned launch of one part of a message."""

    part: int
    launch: LaunchFunction


class FusedPlan(NamedTuple):
    """The plan of calls of one shape: a launch for each part that has elements."""

    spec: OpSpec
    text: str
    launches: tuple[PartLaunch, ...]
    sent_bytes: int

    @property
    def table_bytes(self) -> int:
        """The memory that the plan itself takes: about 16 KB of kernel arguments for each launch."""
        return len(self.launches) << 14

    @property
    def fuses_epilogue(self) -> bool:
        """Whether its kernel applies a ``FusedEpilogue``."""
        return self.spec.collective == "all_reduce"


class FusedEpilogue(NamedTuple):
    """What a kernel adds to the sum in the pass that writes it: bias [features] and addend [as the tensor]."""

    bias: torch.Tensor | None
    addend: torch.Tensor | None

    @property
    def features(self) -> int:
        """Elements of the bias; 0 without one."""
        return 0 if self.bias is None else self.bias.numel()

    def pointers(self) -> tuple[int, int]:
        """The addresses of bias and addend; 0 where there is none."""
        return address(self.bias), address(self.addend)


NO_EPILOGUE = FusedEpilogue(None, None)


class FusedRanks:
    """The local ranks of a group whose members reach each other's memory.

    Args:
        launcher: Where the kernels run.
        buffer_layout: Layout of the reachable memory.
        memory: The address of each rank's reachable memory, for all ranks of the group.
        pads: For each local rank the int32 word in which kernels record a missing rank.
        first_rank: The first local rank.
        local_ranks: 1 in a process of its own, or all of them as virtual ranks.
        timeout_ns: How long a kernel waits for one signal.
    """

    def __init__(
        self,
        launcher: Launcher,
        buffer_layout: PeerBufferLayout,
        memory: Sequence[int],
        pads: Sequence[torch.Tensor],
        first_rank: int,
        local_ranks: int,
        timeout_ns: int = TIMEOUT_NS,
    ) -> None:
        self.ranks, self.first_rank, self.local_ranks = len(memory), first_rank, local_ranks
        self.buffer_layout = buffer_layout
        self.pads = pads
        self._launcher = launcher
        self._memory = list(memory)
        self._timeout_ns = timeout_ns

    def prepare(self, spec: OpSpec) -> FusedPlan:
        """Plan calls of this shape. NoFusedKernel if there is none, for a reason that is the same on all ranks."""
        reason = why_not(spec, self.ranks)
        if reason:
            raise NoFusedKernel(reason)
        launches = []
        for index, part in enumerate(spec.parts):
            if part.numel:
                try:
                    launch = self._launcher.plan(**self._kernel_spec(spec, part))
                except ValueError as error:
                    raise NoFusedKernel(f"{spec.algorithm} has no fused kernel: {error}") from None
                launches.append(PartLaunch(index, launch))
        return FusedPlan(spec, str(spec), tuple(launches), self._sent_bytes(spec))

    def set_timeout(self, seconds: float) -> None:
        """Let kernels of later plans wait for one signal for so many seconds."""
        self._timeout_ns = int(seconds * 1e9)

    def launch(
        self, plan: FusedPlan, buffers: Sequence[Sequence[Buffers]], epilogues: Sequence[FusedEpilogue] = ()
    ) -> None:
        """Queue a call on the current stream, with the buffers of each part for each local rank.

        ``epilogues``: for each local rank what is added to its sum; needs a plan that ``fuses_epilogue`` and has one
        part.
        """
        epilogues = epilogues or [NO_EPILOGUE] * len(buffers)
        features = epilogues[0].features
        for part, launch in plan.launches:
            tensors = [
                (*parts[part].pointers(), *epilogue.pointers())
                for parts, epilogue in zip(buffers, epilogues, strict=True)
            ]
            launch(tensors, features)

    def _kernel_spec(self, spec: OpSpec, part: TensorSpec) -> dict[str, Any]:
        """The arguments of ``_cuda.FusedPlan`` for one part."""
        granule, layout = part.codec.granularity, self.buffer_layout
        granules = -(-(max(spec.splits) if spec.splits else part.numel) // granule)
        if spec.collective == "all_reduce" and spec.algorithm != "one_shot":
            granules = -(-granules // self.ranks)
        most = layout.slot_bytes // part.codec.wire_bytes(granule, part.dtype)
        section = section_granules(granules, most, layout.blocks)
        return {
            "collective": COLLECTIVES[spec.collective],
            "algorithm": ALGORITHMS[spec.algorithm],
            "codec": part.codec.native(),
            "dtype": ELEMENT_TYPES[part.dtype],
            "numel": part.numel,
            "splits": list(spec.splits),
            "op": OPERATIONS["sum" if spec.op == "avg" else spec.op],
            "divisor": self.ranks if spec.op == "avg" else 1,
            "encodes_own": spec.algorithm == TWO_SHOT_SYMMETRIC,
            "rounds_sum": spec.algorithm != TWO_SHOT_SYMMETRIC,
            "ranks": self.ranks,
            "first_rank": self.first_rank,
            "local_ranks": self.local_ranks,
            "buffer_layout": layout,
            "blocks": min(layout.blocks, -(-granules // section)),
            "section": section,
            "timeout_ns": self._timeout_ns,
            "memory": self._memory,
        }

    def _sent_bytes(self, spec: OpSpec) -> int:
        """Bytes that the first local rank writes into peers' memory in one call."""
        own, ranks = self.first_rank, self.ranks
        if spec.collective == "all_reduce" and spec.algorithm == "one_shot":
            return (ranks - 1) * sum(spec.chunk_payload_bytes(1, ranks))
        exchanges = spec.collective == "all_to_all"
        chunks = spec.chunk_payload_bytes(ranks**2 if exchanges else ranks, ranks)
        if exchanges:
            chunks = chunks[own * ranks : (own + 1) * ranks]
        sent = sum(chunks) - chunks[own]
        return sent + (ranks - 1) * chunks[own] if spec.collective == "all_reduce" else sent


def why_not(spec: OpSpec, ranks: int) -> str:
    """Why there is no fused kernel for calls of this shape; empty where there is one.

    Whether a device's reachable memory suffices is not asked.
    """
    if not 2 <= ranks <= MAX_RANKS:
        return f"{ranks} ranks: fused kernels serve 2 to {MAX_RANKS}"
    served = spec.algorithm in ALGORITHMS and spec.collective in COLLECTIVES
    if not served or (spec.algorithm != "one_shot" and spec.collective != "all_reduce"):
        return f"{spec.algorithm} has no fused kernel of {spec.collective}"
    if spec.checksum:
        return "payloads of fused kernels carry no checksum"
    for part in spec.parts:
        codec = part.codec
        if part.between is not None and part.between != codec and part.granularity != codec.granularity:
            return f"codec {part.spec}: fused kernels stay inside one host"
        if codec.name == "none" and spec.collective in ("all_gather", "all_to_all"):
            continue
        if codec.in_python:
            return f"codec {part.spec} is written in Python, which no kernel calls"
        if not _C.fusible(codec.native(), ELEMENT_TYPES[part.dtype]):
            dtype = str(part.dtype).removeprefix("torch.")
            return f"codec {part.spec} of {dtype} has no fused kernel"
    return ""
