"""What one rank does for one piece of a collective: the only thing a runtime reads.

A program is a tuple of instructions, run in order. Its operands are *chunks* of the piece and *boxes*: a box
holds one encoded chunk, is written once by the rank that owns it and read by any number of peers. Boxes are
numbered per owner, so (rank, box) names a payload in the whole group.

The input tensor is read once per chunk (by ``Encode``, or by the ``Reduce`` whose ``local`` is ``INPUT``) and
the output is written once per chunk (by the instruction with ``output``), so the two may be the same memory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar


class Local(enum.IntEnum):
    """Where the unencoded term of a ``Reduce`` comes from."""

    NONE = 0
    INPUT = 1
    ACCUMULATOR = 2


@dataclass(frozen=True, kw_only=True)
class Encode:
    """``box`` <- encoding of the input's chunk; with ``output`` also output <- its decoding."""

    code: ClassVar[int] = 1
    chunk: int
    box: int
    output: bool = False
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Send:
    """Own ``box`` is complete: let ``peers`` have it."""

    code: ClassVar[int] = 2
    chunk: int
    box: int
    peers: tuple[int, ...]
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Receive:
    """Wait until ``peer``'s ``box`` can be read."""

    code: ClassVar[int] = 3
    chunk: int
    peer: int
    box: int
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """One fp32 sum of decoded ``inputs`` (rank, box) in order, ``local`` standing before
    ``inputs[position]``.

    The sum goes to ``box`` (encoded) where that is not None; to the output, decoded from ``box`` if there is
    one, where ``output``; to the chunk's fp32 accumulator where ``keep``. ``divide`` marks the sum that holds
    every rank's contribution: ``avg`` divides there. ``level`` is the level of ``box``; ``input_levels`` of
    the inputs.
    """

    code: ClassVar[int] = 4
    chunk: int
    inputs: tuple[tuple[int, int], ...]
    local: Local
    position: int = 0
    box: int | None = None
    output: bool = False
    keep: bool = False
    divide: bool = False
    level: int = 0
    input_levels: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Adopt:
    """Output <- decoding of ``peer``'s ``box``; (own rank, own box) is allowed."""

    code: ClassVar[int] = 5
    chunk: int
    peer: int
    box: int
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Own ``box`` <- the bytes of ``peer``'s ``source``, unchanged, to be sent on."""

    code: ClassVar[int] = 6
    chunk: int
    peer: int
    source: int
    box: int
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Output <- input: a chunk that nobody sent and nothing changed."""

    code: ClassVar[int] = 7
    chunk: int


Instruction = Encode | Send | Receive | Reduce | Adopt | Forward | Copy


@dataclass(frozen=True, kw_only=True)
class Program:
    """``boxes[r]`` is how many boxes rank r owns, so that every rank knows every other's layout."""

    collective: str
    rank: int
    ranks: int
    chunks: int
    boxes: tuple[int, ...]
    instructions: tuple[Instruction, ...]

    def flat(self) -> list[int]:
        """The instructions as integers, as the native engine reads them.

        Each is ``code, chunk, length`` and then ``length`` operands: Encode ``box output level``; Send ``box
        level peers...``; Receive ``peer box level``; Reduce ``local position box(-1) output keep divide level
        count (rank box level)...``; Adopt ``peer box level``; Forward ``peer source box level``; Copy
        nothing.
        """
        out: list[int] = []
        for instruction in self.instructions:
            operands = _operands(instruction)
            out += [instruction.code, instruction.chunk, len(operands), *operands]
        return out


def _operands(instruction: Instruction) -> list[int]:
    match instruction:
        case Encode(box=box, output=output, level=level):
            return [box, int(output), level]
        case Send(box=box, level=level, peers=peers):
            return [box, level, *peers]
        case Receive(peer=peer, box=box, level=level) | Adopt(peer=peer, box=box, level=level):
            return [peer, box, level]
        case Forward(peer=peer, source=source, box=box, level=level):
            return [peer, source, box, level]
        case Copy():
            return []
        case Reduce():
            levels = instruction.input_levels or (0,) * len(instruction.inputs)
            operands = [
                int(instruction.local),
                instruction.position,
                -1 if instruction.box is None else instruction.box,
                int(instruction.output),
                int(instruction.keep),
                int(instruction.divide),
                instruction.level,
                len(instruction.inputs),
            ]
            for (rank, box), level in zip(instruction.inputs, levels, strict=True):
                operands += [rank, box, level]
            return operands
