"""Plans and launches of fused CUDA collectives over memory that all ranks of a host reach.

A direct algorithm is one kernel launch; a lowered schedule (ring, tree, a schedule of one's own) is one launch for each
of its steps. The same code serves one rank of several processes, all ranks as virtual ranks of one device, and all
ranks on the CPU, where the optional module ``dtcomm._emulator`` runs the kernels' source. :class:`PeerRuntime` and
``dtcomm.measure.virtual_ranks`` call it. docs/how-it-works/gpu-status.md describes the kernels, and
csrc/cuda/fused/collective.h the kernel arguments.

A program's receivers may load payloads from the memory of the rank that owns them. Over PCIe such loads are slow, while
stores are not waited for. With inboxes, a `Send` stores the payload into a place of each receiver's memory, and every
instruction reads payloads of peers from its own rank's inbox. `verify_inboxes` proves it for the programs of a
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dtcomm import _C
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.errors import ScheduleError
from dtcomm.kernels.calls import OPERATIONS, address
from dtcomm.runtime.types import GEOMETRY, TWO_SHOT_SYMMETRIC, Buffers, OpSpec, TensorSpec
from dtcomm.schedule import Schedule, lower
from dtcomm.schedule.ir import CUT_AT_GRANULES, REDUCING
from dtcomm.schedule.lower import Decode, Encode, Forward, Instruction, Program, Receive, Reduce, Send, steps

#: Whether the fused kernels have run between several GPUs. Until then only DTCOMM_RUNTIME=peer uses them.
RAN_BETWEEN_GPUS = False

COLLECTIVES = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 2, "all_to_all": 3}
ALGORITHMS = {"two_shot": 0, "one_shot": 1, TWO_SHOT_SYMMETRIC: 0}
PROGRAM = 2
MAX_RANKS: int = _C.MAX_RANKS
SLOT_BYTES = 16 * 1024  # for a section's payload: enough to fill a link while the next section is encoded
BOX_BYTES = 32 * 2**20  # for the payloads of a program's piece: tensors of tens of megabytes take one piece
TIMEOUT_NS = 10 * 10**9
BLOCKS_OF_A_MULTIPROCESSOR = 2  # the registers of a kernel allow two, and all its blocks must be resident

#: The payloads that are pushed to a rank, (owner, payload_id) each, by their place.
Inbox = tuple[tuple[int, int], ...]
#: Addresses of a rank's input, output, residual, bias and addend; 0 where there is none.
RankPointers = tuple[int, int, int, int, int]
#: Launches a planned collective with the tensors of each local rank and the number of features of their bias.
LaunchFunction = Callable[[list[RankPointers], int], None]


class PeerBufferLayout(NamedTuple):
    """Layout of the memory that peers reach, the same on all ranks. Sizes in bytes."""

    blocks: int
    slot_bytes: int = SLOT_BYTES
    box_bytes: int = 0


def layout_for(gpus: Sequence[dict[str, Any]]) -> PeerBufferLayout:
    """The layout for ranks with these GPUs (``cuda_peer.memory.describe_gpu``); it does not depend on tensors."""
    return PeerBufferLayout(min(gpu["blocks"] for gpu in gpus), SLOT_BYTES, BOX_BYTES)


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


class LoweredSchedule(NamedTuple):
    """The programs of all ranks. ``step_of`` holds the schedule's step of each instruction of each rank's program;
    ``keeps_sums`` says whether some rank keeps sums from step to step. ``inboxes`` are those of all ranks where senders
    push payloads; empty where receivers load them.
    """

    programs: tuple[Program, ...]
    step_of: tuple[tuple[int, ...], ...]
    steps: int
    keeps_sums: bool
    inboxes: tuple[Inbox, ...] = ()

    @property
    def chunks(self) -> int:
        """Chunks of the tensors, the same in all programs."""
        return self.programs[0].chunks

    def kernel_spec(self, spec: OpSpec, first_rank: int, local_ranks: int) -> dict[str, Any]:
        """The arguments of ``_cuda.FusedPlan`` that describe the programs of the local ranks."""
        return {
            "collective": GEOMETRY[spec.collective],
            "programs": [
                (
                    self.chunks,
                    list(self.programs[rank].payload_counts),
                    self.programs[rank].flat(),
                    list(self.step_of[rank]),
                )
                for rank in range(first_rank, first_rank + local_ranks)
            ],
            "steps": self.steps,
            "keeps_sums": self.keeps_sums,
            "inboxes": list(map(list, self.inboxes)),
        }

    def chunk_granules(self, spec: OpSpec, part: TensorSpec) -> int:
        """Granules of the largest chunk."""
        whole = -(-(max(spec.splits) if spec.splits else part.numel) // part.codec.granularity)
        return -(-whole // self.chunks) if spec.collective in CUT_AT_GRANULES else whole

    def sent_bytes(self, spec: OpSpec, rank: int) -> int:
        """Bytes of the payloads that a rank sends; a payload that goes to two peers counts twice."""
        chunk_bytes = spec.chunk_payload_bytes(self.chunks, len(self.programs))
        return sum(
            len(instruction.peers) * chunk_bytes[instruction.chunk]
            for instruction in self.programs[rank].instructions
            if isinstance(instruction, Send)
        )


def lower_for_all_ranks(schedule: Schedule, pushes: bool = False) -> LoweredSchedule:
    """The programs of all ranks: every rank lowers them all, so that all agree on the memory that a call takes.

    With ``pushes``, senders store payloads into the receivers' inboxes, which is proven first: ScheduleError names
    rank, step and chunk of a payload that cannot be pushed to a rank that reads it.
    """
    ranks = range(schedule.ranks)
    programs = tuple(lower(schedule, rank) for rank in ranks)
    keeps_sums = any(
        isinstance(instruction, Reduce) and instruction.keep_partial_sum
        for program in programs
        for instruction in program.instructions
    )
    step_of = tuple(steps(schedule, rank) for rank in ranks)
    count = max(schedule.steps, 1)
    inboxes = plan_inboxes(programs) if pushes else ()
    if pushes:
        verify_inboxes(programs, step_of, count, inboxes)
    return LoweredSchedule(programs, step_of, count, keeps_sums, inboxes)


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
        return self.spec.collective == "all_reduce" and self.spec.algorithm in ALGORITHMS


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
        pushes: Whether kernels of lowered schedules store payloads into the receivers' memory, so that no rank loads
            from a peer's, as those of the direct algorithms always do. The same on all ranks.
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
        pushes: bool = False,
    ) -> None:
        self.pushes = pushes
        self.ranks, self.first_rank, self.local_ranks = len(memory), first_rank, local_ranks
        self.buffer_layout = buffer_layout
        self.pads = pads
        self._launcher = launcher
        self._memory = list(memory)
        self._timeout_ns = timeout_ns

    def prepare(self, spec: OpSpec, schedule: Schedule | None = None) -> FusedPlan:
        """Plan calls of this shape; ``schedule`` is needed unless the algorithm is one of ``ALGORITHMS``.

        NoFusedKernel if there is none, for a reason that is the same on all ranks.
        """
        reason = why_not(spec, self.ranks, schedule)
        if reason:
            raise NoFusedKernel(reason)
        program = None
        if schedule is not None and not _is_direct(spec):
            try:
                program = lower_for_all_ranks(schedule, self.pushes)
            except ScheduleError as error:
                raise NoFusedKernel(f"{spec.algorithm} cannot be pushed: {error}") from None
        launches = []
        for index, part in enumerate(spec.parts):
            if part.numel:
                try:
                    launch = self._launcher.plan(**self._kernel_spec(spec, part, program))
                except ValueError as error:
                    raise NoFusedKernel(f"{spec.algorithm} has no fused kernel: {error}") from None
                launches.append(PartLaunch(index, launch))
        if program is not None:
            sent = program.sent_bytes(spec, self.first_rank)
        else:
            sent = self._sent_bytes(spec)
        return FusedPlan(spec, str(spec), tuple(launches), sent)

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

    def _kernel_spec(self, spec: OpSpec, part: TensorSpec, program: LoweredSchedule | None) -> dict[str, Any]:
        """The arguments of ``_cuda.FusedPlan`` for one part."""
        granule, layout = part.codec.granularity, self.buffer_layout
        if program is not None:
            special = {"algorithm": PROGRAM, **program.kernel_spec(spec, self.first_rank, self.local_ranks)}
            blocks, section = max(1, program.chunk_granules(spec, part)), 0
        else:
            special = {"algorithm": ALGORITHMS[spec.algorithm], "collective": COLLECTIVES[spec.collective]}
            granules = -(-(max(spec.splits) if spec.splits else part.numel) // granule)
            if spec.collective == "all_reduce" and spec.algorithm != "one_shot":
                granules = -(-granules // self.ranks)
            most = layout.slot_bytes // part.codec.wire_bytes(granule, part.dtype)
            section = section_granules(granules, most, layout.blocks)
            blocks = -(-granules // section)
        return {
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
            "blocks": min(layout.blocks, blocks),
            "section": section,
            "timeout_ns": self._timeout_ns,
            "memory": self._memory,
            **special,
        }

    def _sent_bytes(self, spec: OpSpec) -> int:
        """Bytes that the first local rank writes into peers' memory in one call of a direct algorithm."""
        own, ranks = self.first_rank, self.ranks
        if spec.collective == "all_reduce" and spec.algorithm == "one_shot":
            return (ranks - 1) * sum(spec.chunk_payload_bytes(1, ranks))
        exchanges = spec.collective == "all_to_all"
        chunks = spec.chunk_payload_bytes(ranks**2 if exchanges else ranks, ranks)
        if exchanges:
            chunks = chunks[own * ranks : (own + 1) * ranks]
        sent = sum(chunks) - chunks[own]
        return sent + (ranks - 1) * chunks[own] if spec.collective == "all_reduce" else sent


def why_not(spec: OpSpec, ranks: int, schedule: Schedule | None = None) -> str:
    """Why there is no fused kernel for calls of this shape; empty where there is one.

    ``schedule`` is what runs where there is no direct kernel. Whether a device's reachable memory suffices is not
    asked.
    """
    if not 2 <= ranks <= MAX_RANKS:
        return f"{ranks} ranks: fused kernels serve 2 to {MAX_RANKS}"
    direct = _is_direct(spec)
    if not direct and (schedule is None or spec.algorithm == TWO_SHOT_SYMMETRIC):
        return f"{spec.algorithm} has no fused kernel of {spec.collective}"
    if spec.algorithm == "send":
        return "send has no fused kernel: a kernel that waits for a message would occupy multiprocessors"
    if spec.checksum:
        return "payloads of fused kernels carry no checksum"
    moves = spec.collective in ("all_gather", "all_to_all") if direct else spec.collective not in REDUCING
    for part in spec.parts:
        codec = part.codec
        if part.between is not None and part.between != codec and not _stays_inside(part, direct, schedule):
            return f"codec {part.spec}: fused kernels stay inside one host"
        if moves and codec.name == "none":
            continue
        if codec.in_python:
            return f"codec {part.spec} is written in Python, which no kernel calls"
        if not _C.fusible(codec.native(), ELEMENT_TYPES[part.dtype]):
            dtype = str(part.dtype).removeprefix("torch.")
            return f"codec {part.spec} of {dtype} has no fused kernel"
    return ""


def _is_direct(spec: OpSpec) -> bool:
    """Whether the collective is one launch, without a program."""
    if spec.algorithm not in ALGORITHMS or spec.collective not in COLLECTIVES:
        return False
    return spec.algorithm == "one_shot" or spec.collective == "all_reduce"


def _stays_inside(part: TensorSpec, direct: bool, schedule: Schedule | None) -> bool:
    """Whether nothing of the part travels in the codec between hosts, which cuts the tensor at the same granules."""
    levels = schedule is not None and any(transfer.level for transfer in schedule.transfers)
    return part.granularity == part.codec.granularity and (direct or not levels)


def plan_inboxes(programs: Sequence[Program]) -> tuple[Inbox, ...]:
    """Return the inbox of each rank: a place for every payload that a `Send` makes available to it."""
    places: list[list[tuple[int, int]]] = [[] for _ in programs]
    for owner, program in enumerate(programs):
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                for peer in instruction.peers:
                    places[peer].append((owner, instruction.payload_id))
    return tuple(map(tuple, places))


def verify_inboxes(
    programs: Sequence[Program], step_of: Sequence[Sequence[int]], steps: int, inboxes: Sequence[Inbox]
) -> None:
    """Prove that ranks which only store into their peers' memory can execute the programs of a verified schedule.

    The proof covers that every payload of a peer is read from the reader's own inbox, that it was pushed there before,
    in a step whose signal the reader has waited for, and that no place is written twice. ``step_of`` is the step of
    each rank's instructions; those of steps behind ``steps`` run in the last one. ScheduleError names rank, step and
    chunk.
    """
    for rank, inbox in enumerate(inboxes):
        if len(set(inbox)) < len(inbox):
            raise ScheduleError(f"rank {rank}: a payload has two places in the inbox")
    by_step: list[list[tuple[int, Instruction]]] = [[] for _ in range(steps)]
    for rank, (program, own_steps) in enumerate(zip(programs, step_of, strict=True)):
        for instruction, step in zip(program.instructions, own_steps, strict=True):
            by_step[min(step, steps - 1)].append((rank, instruction))
    execution = _PushedPrograms(inboxes)
    for instructions in by_step:
        execution.run_step(instructions)


class _PushedPrograms:
    """The programs of all ranks, executed step by step, without data."""

    def __init__(self, inboxes: Sequence[Inbox]) -> None:
        self.step = 0
        self._places = [set(inbox) for inbox in inboxes]
        self._written: set[tuple[int, int]] = set()  # (owner, payload_id) of complete payloads
        self._pushed: dict[tuple[int, int, int], int] = {}  # (receiver, owner, payload_id): the step
        self._received: set[tuple[int, int, int]] = set()  # whose signals the receiver has waited for

    def run_step(self, instructions: Sequence[tuple[int, Instruction]]) -> None:
        """Execute a step: payloads are written, then pushed; the peers' signals arrive; then the rest."""
        for rank, instruction in instructions:
            if isinstance(instruction, Forward):
                self._read(rank, instruction, instruction.peer, instruction.source_id)
            if isinstance(instruction, Encode | Forward):
                self._written.add((rank, instruction.payload_id))
        for rank, instruction in instructions:
            if isinstance(instruction, Send):
                self._push(rank, instruction)
        for rank, instruction in instructions:
            if isinstance(instruction, Receive):
                place = (rank, instruction.peer, instruction.payload_id)
                sent = self._pushed.get(place) == self.step
                self._require(
                    sent, rank, instruction, f"{_payload_name(*place[1:])} is not sent to it in this step"
                )
                self._received.add(place)
        for rank, instruction in instructions:
            if isinstance(instruction, Decode):
                self._read(rank, instruction, instruction.peer, instruction.payload_id)
            if isinstance(instruction, Reduce):
                for owner, payload_id in instruction.inputs:
                    self._read(rank, instruction, owner, payload_id)
                if instruction.payload_id is not None:
                    self._written.add((rank, instruction.payload_id))
        self.step += 1

    def _push(self, rank: int, send: Send) -> None:
        name = _payload_name(rank, send.payload_id)
        self._read(rank, send, rank, send.payload_id)
        for peer in send.peers:
            has_place = (rank, send.payload_id) in self._places[peer]
            self._require(has_place, rank, send, f"{name} has no place in the inbox of rank {peer}")
            place = (peer, rank, send.payload_id)
            self._require(place not in self._pushed, rank, send, f"{name} is pushed to rank {peer} twice")
            self._pushed[place] = self.step

    def _read(self, rank: int, instruction: Instruction, owner: int, payload_id: int) -> None:
        name = _payload_name(owner, payload_id)
        if owner == rank:
            self._require((rank, payload_id) in self._written, rank, instruction, f"{name} is not complete")
        else:
            arrived = (rank, owner, payload_id) in self._received
            self._require(arrived, rank, instruction, f"{name} is read before it has arrived")

    def _require(self, holds: bool, rank: int, instruction: Instruction, problem: str) -> None:
        if not holds:
            raise ScheduleError(f"rank {rank} step {self.step} chunk {instruction.chunk}: {problem}")


def _payload_name(owner: int, payload_id: int) -> str:
    return f"payload {payload_id} of rank {owner}"
