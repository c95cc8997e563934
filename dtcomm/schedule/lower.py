"""Lowering: from a schedule to the program of one rank.

Versions that are sent become payloads, transfers become instructions. Every runtime calls `lower`; the runtimes that
execute a program step by step also call `steps`.

A `Program` is what one rank does for one piece of a collective: instructions that run in order. Their operands are
*chunks* of the piece and *payloads*. A payload is one encoded chunk: the rank that owns it writes it once, and any
number of peers read it. Payloads are numbered per owner, so (rank, payload_id) names a payload in the whole group.

A program reads the input tensor once per chunk (by `Encode`, or by the `Reduce` whose ``local`` is ``INPUT``) and
writes the output once per chunk (by the instruction with ``output``). Therefore input and output may be the same
memory.

The native engine reads a program in the form of `Program.flat`. Its csrc/engine/program.h calls the memory of a payload
a *box*; a payload_id is the number of the box.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dtcomm.schedule.ir import REDUCING, History, Origin, Schedule, Version, trace


class Local(enum.IntEnum):
    """The source of the unencoded term of a `Reduce`."""

    NONE = 0
    INPUT = 1
    ACCUMULATOR = 2


@dataclass(frozen=True, kw_only=True)
class Encode:
    """Encode the input's chunk into the own payload ``payload_id``; with ``output``, decode it into the output too."""

    code: ClassVar[int] = 1
    chunk: int
    payload_id: int
    output: bool = False
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Send:
    """Make the complete own payload ``payload_id`` available to ``peers``."""

    code: ClassVar[int] = 2
    chunk: int
    payload_id: int
    peers: tuple[int, ...]
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Receive:
    """Wait until payload ``payload_id`` of ``peer`` can be read."""

    code: ClassVar[int] = 3
    chunk: int
    peer: int
    payload_id: int
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """Compute one fp32 sum of the decoded ``inputs`` (rank, payload_id) in order.

    The unencoded ``local`` term stands before ``inputs[position]``. The sum is encoded into the own payload
    ``payload_id`` if that is not None. With ``output`` it is written to the output, decoded from the payload if there
    is one. With ``keep_partial_sum`` it is stored in the chunk's fp32 accumulator. ``divide`` marks the sum that
    contains every rank's contribution: ``avg`` divides there. ``level`` is the level of the payload written,
    ``input_levels`` are those of the inputs.
    """

    code: ClassVar[int] = 4
    chunk: int
    inputs: tuple[tuple[int, int], ...]
    local: Local
    position: int = 0
    payload_id: int | None = None
    output: bool = False
    keep_partial_sum: bool = False
    divide: bool = False
    level: int = 0
    input_levels: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Decode payload ``payload_id`` of ``peer`` into the output; the peer may be the rank itself."""

    code: ClassVar[int] = 5
    chunk: int
    peer: int
    payload_id: int
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Copy the bytes of ``peer``'s payload ``source_id`` unchanged into the own payload ``payload_id``, to send them
    on.
    """

    code: ClassVar[int] = 6
    chunk: int
    peer: int
    source_id: int
    payload_id: int
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy the input's chunk to the output: no rank sent the chunk, and nothing changed it."""

    code: ClassVar[int] = 7
    chunk: int


Instruction = Encode | Send | Receive | Reduce | Decode | Forward | Copy


@dataclass(frozen=True, kw_only=True)
class Program:
    """The instructions of one rank; `dtcomm.schedule.lower` builds it.

    Attributes:
        collective: Name of the collective.
        rank: The rank that runs the program.
        ranks: Number of ranks.
        chunks: Number of chunks of the schedule.
        payload_counts: How many payloads each rank owns, so that every rank knows the memory layout of all others.
        instructions: The instructions, in order.
    """

    collective: str
    rank: int
    ranks: int
    chunks: int
    payload_counts: tuple[int, ...]
    instructions: tuple[Instruction, ...]

    def flat(self) -> list[int]:
        """Return the instructions as integers, the form that the native engine reads.

        Each instruction is ``code, chunk, length`` and then ``length`` operands, where ``id`` is a payload_id: Encode
        ``id output level``; Send ``id level peers...``; Receive ``peer id level``; Reduce ``local position id(-1)
        output keep_partial_sum divide level count (rank id level)...``; Decode ``peer id level``; Forward ``peer
        source_id id level``; Copy has none.
        """
        integers: list[int] = []
        for instruction in self.instructions:
            operands = _operands(instruction)
            integers += [instruction.code, instruction.chunk, len(operands), *operands]
        return integers


def _operands(instruction: Instruction) -> list[int]:
    match instruction:
        case Encode(payload_id=payload_id, output=output, level=level):
            return [payload_id, int(output), level]
        case Send(payload_id=payload_id, level=level, peers=peers):
            return [payload_id, level, *peers]
        case (
            Receive(peer=peer, payload_id=payload_id, level=level)
            | Decode(peer=peer, payload_id=payload_id, level=level)
        ):
            return [peer, payload_id, level]
        case Forward(peer=peer, source_id=source_id, payload_id=payload_id, level=level):
            return [peer, source_id, payload_id, level]
        case Copy():
            return []
        case Reduce():
            levels = instruction.input_levels or (0,) * len(instruction.inputs)
            operands = [
                int(instruction.local),
                instruction.position,
                -1 if instruction.payload_id is None else instruction.payload_id,
                int(instruction.output),
                int(instruction.keep_partial_sum),
                int(instruction.divide),
                instruction.level,
                len(instruction.inputs),
            ]
            for (rank, payload_id), level in zip(instruction.inputs, levels, strict=True):
                operands += [rank, payload_id, level]
            return operands


PayloadIds = dict[Version, int]


def lower(schedule: Schedule, rank: int) -> Program:
    """Return the program that ``rank`` executes for ``schedule``, its instructions in the order of the steps.

    Within a step the rank first encodes or forwards and sends what the step sends, then writes outputs that it also
    passed on, then receives. Each `Receive` stands just before the instruction that reads the payload. A version that
    is ever sent has a payload; the `Reduce` that computes a sum also encodes it.

    Args:
        schedule: A schedule, which should be verified.
        rank: A rank of the schedule.

    Returns:
        The program.

    Raises:
        ValueError: If the schedule has no such rank.
        ScheduleError: If the transfers have no meaning.

    Example:
        >>> from dtcomm import algorithms
        >>> from dtcomm.schedule import lower
        >>> program = lower(algorithms.build("two_shot", "all_reduce", 2), rank=0)
        >>> [type(instruction).__name__ for instruction in program.instructions]
        ['Encode', 'Send', 'Receive', 'Reduce', 'Send', 'Receive', 'Decode']
    """
    # One history for both: another thread's `trace` of an equal schedule has versions of its own.
    history = trace(schedule)
    payload_ids, counts = _number_payloads(schedule, history)
    return Program(
        collective=schedule.collective,
        rank=rank,
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        payload_counts=tuple(counts),
        instructions=tuple(instruction for _, instruction in _emit(schedule, history, rank, payload_ids)),
    )


def steps(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Return the step of each instruction of ``lower(schedule, rank)``; steps never decrease in program order."""
    history = trace(schedule)
    return tuple(step for step, _ in _emit(schedule, history, rank, _number_payloads(schedule, history)[0]))


def _emit(
    schedule: Schedule, history: History, rank: int, payload_ids: PayloadIds
) -> Iterator[tuple[int, Instruction]]:
    if not 0 <= rank < schedule.ranks:
        raise ValueError(f"rank: {rank} is not a rank of 0..{schedule.ranks - 1}")
    own_versions = [version for version in history.versions if version.rank == rank]
    outputs = {version for place, version in history.outputs.items() if place[0] == rank}

    sends: dict[int, dict[Version, list[int]]] = defaultdict(dict)
    created: dict[int, list[Version]] = defaultdict(list)
    for version in sorted(own_versions, key=lambda version: version.chunk):
        created[version.step].append(version)
        for transfer in version.sends:
            sends[transfer.step].setdefault(version, []).append(transfer.dst)

    unsent_sums = {v for v in own_versions if v.origin is Origin.SUM and not v.sends}
    partial_sums = {source for v in own_versions for source in v.sources if source in unsent_sums}
    all_ranks = (1 << schedule.ranks) - 1

    for step in range(schedule.steps):
        decodes_of_forwarded: list[Instruction] = []
        for version, peers in sends[step].items():
            if version.first_sent == step:
                if version.origin is Origin.INPUT:
                    yield step, _encode(version, payload_ids, version in outputs)
                elif version.origin is Origin.COPY:
                    yield step, _forward(version, payload_ids)
                    if version in outputs:
                        decodes_of_forwarded.append(_decode(version, payload_ids))
            yield (
                step,
                Send(
                    chunk=version.chunk,
                    payload_id=payload_ids[version],
                    peers=tuple(sorted(peers)),
                    level=version.level,
                ),
            )
        for instruction in decodes_of_forwarded:
            yield step, instruction
        for version in created[step]:
            for receive in _receives(version, payload_ids):
                yield step, receive
            if version.origin is Origin.SUM:
                divide = schedule.collective in REDUCING and version.contributors == all_ranks
                keep_partial_sum = version in partial_sums
                yield step, _reduce(version, payload_ids, version in outputs, keep_partial_sum, divide)
            elif version in outputs and not version.sends:
                yield step, _decode(version, payload_ids)
    for version in created[-1]:
        if version in outputs and not version.sends:
            yield schedule.steps, Copy(chunk=version.chunk)


def _number_payloads(schedule: Schedule, history: History) -> tuple[PayloadIds, list[int]]:
    """Return the payload_id of every version that is sent, and how many payloads each rank owns."""
    # Every rank computes the numbering of all ranks, so a payload needs no other name on the wire.
    sent = [version for version in history.versions if version.sends]
    payload_ids: PayloadIds = {}
    counts = [0] * schedule.ranks
    for version in sorted(sent, key=lambda v: (v.sends[0].step, v.chunk)):
        payload_ids[version] = counts[version.rank]
        counts[version.rank] += 1
    return payload_ids, counts


def _payload_of(version: Version, payload_ids: PayloadIds) -> tuple[int, int]:
    """Return the (rank, payload_id) of the version's bytes: its own, or the one that a copy was received in."""
    if version in payload_ids:
        return version.rank, payload_ids[version]
    return version.sources[0].rank, payload_ids[version.sources[0]]


def _encode(version: Version, payload_ids: PayloadIds, output: bool) -> Encode:
    return Encode(chunk=version.chunk, payload_id=payload_ids[version], output=output, level=version.level)


def _forward(version: Version, payload_ids: PayloadIds) -> Forward:
    source = version.sources[0]
    return Forward(
        chunk=version.chunk,
        peer=source.rank,
        source_id=payload_ids[source],
        payload_id=payload_ids[version],
        level=version.level,
    )


def _decode(version: Version, payload_ids: PayloadIds) -> Decode:
    peer, payload_id = _payload_of(version, payload_ids)
    return Decode(chunk=version.chunk, peer=peer, payload_id=payload_id, level=version.level)


def _receives(version: Version, payload_ids: PayloadIds) -> list[Instruction]:
    return [
        Receive(chunk=version.chunk, peer=source.rank, payload_id=payload_ids[source], level=source.level)
        for source in version.sources
        if source.rank != version.rank
    ]


def _reduce(
    version: Version, payload_ids: PayloadIds, output: bool, keep_partial_sum: bool, divide: bool
) -> Reduce:
    terms = list(version.sources)
    local, position = Local.NONE, 0
    own = next(index for index, term in enumerate(terms) if term.rank == version.rank)
    if not terms[own].sends and terms[own].origin is not Origin.COPY:
        local = Local.INPUT if terms[own].origin is Origin.INPUT else Local.ACCUMULATOR
        position = own
        del terms[own]
    return Reduce(
        chunk=version.chunk,
        inputs=tuple(_payload_of(term, payload_ids) for term in terms),
        local=local,
        position=position,
        payload_id=payload_ids.get(version),
        output=output,
        keep_partial_sum=keep_partial_sum,
        divide=divide,
        level=version.level,
        input_levels=tuple(term.level for term in terms),
    )
