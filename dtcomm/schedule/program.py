"""The program of one rank for one piece of a collective: the only thing that a runtime reads.

A program is a tuple of instructions that run in order. Their operands are *chunks* of the piece and *payloads*. A
payload is one encoded chunk: the rank that owns it writes it once, and any number of peers read it. Payloads are
numbered per owner, so (rank, payload_id) names a payload in the whole group.

A program reads the input tensor once per chunk (by `Encode`, or by the `Reduce` whose ``local`` is ``INPUT``) and
writes the output once per chunk (by the instruction with ``output``). Therefore input and output may be the same
memory.

The native engine reads a program in the form of `Program.flat`. Its csrc/engine/program.h calls the memory of a payload
a *box*; a payload_id is the number of the box.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar


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
