"""A program laid over the shapes of one call, without its tensors: made once and replayed by every call like it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from dtcomm.runtime.torchdist.layout import Piece, lay_out, payload_bytes, piece_elements
from dtcomm.runtime.types import OpSpec
from dtcomm.schedule import Schedule, lower
from dtcomm.schedule.lower import steps
from dtcomm.schedule.program import Encode, Forward, Instruction, Local, Receive, Reduce

WINDOW = 4  # pieces under way at once
ALIGNMENT = 64

Box = tuple[int, int]  # (rank, box)


class Plan:
    """What a rank does for calls of one shape, piece by piece, and the memory that this takes.

    ``order`` lists (piece, position of a Receive in the program) in the order in which they are waited for.
    ``places`` gives each box that this rank writes or receives a byte offset in a slot of ``slot_bytes`` bytes;
    ``takes`` and ``leaves`` are the positions of the instructions that read and rewrite the residual.
    """

    def __init__(self, spec: OpSpec, schedule: Schedule, rank: int, message_bytes: int) -> None:
        program = lower(schedule, rank)
        self.spec = spec
        self.text = str(spec)
        self.rank = rank
        self.instructions = program.instructions
        self.divisor = program.ranks if spec.op == "avg" else 1
        chunks = program.chunks
        self.pieces: tuple[Piece, ...] = ()
        if spec.parts:
            self.pieces = lay_out(spec, chunks, piece_elements(spec, chunks, message_bytes))
        self.order = _order(self.pieces, self.instructions, steps(schedule, rank), schedule.steps)
        self.takes, self.leaves = _residuals(self.instructions)
        self.places: dict[Box, int] = {}
        self.slot_bytes = self._place()
        # Where ranks make different calls their tags differ too, so that a message is never received into a
        # buffer that is not meant for it (Gloo ends the process where the sizes differ).
        self.fingerprint = zlib.crc32(self.text.encode())

    def _place(self) -> int:
        at = 0
        for instruction in self.instructions:
            owner = self.rank
            match instruction:
                case Receive(peer=owner, payload_id=box):
                    pass
                case Encode(payload_id=box) | Reduce(payload_id=int(box)):
                    pass
                case Forward(peer=peer, source_id=source, payload_id=box):
                    self.places[owner, box] = self.places[peer, source]  # passed on from where it arrived
                    continue
                case _:
                    continue
            self.places[owner, box] = at
            sizes = (payload_bytes(piece[instruction.chunk], instruction.level) for piece in self.pieces)
            largest = max(sizes, default=0)
            at += -(-largest // ALIGNMENT) * ALIGNMENT
        return at


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which an unencoded sum of ``dtype`` is kept between instructions."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _order(
    pieces: Sequence[Piece], instructions: Sequence[Instruction], step_of: Sequence[int], steps: int
) -> list[tuple[int, int]]:
    # The pieces run as a pipeline, each one step behind the one before it, WINDOW at a time. Every rank waits for
    # its receives in the order of (time, piece), where a piece's step comes at time start(piece) + step. No rank
    # can then wait in a circle:
    # - Take the earliest receive that any rank is stuck at. Its sender has all its earlier receives, and a rank
    #   runs every piece as far as it can before it waits; so the sender has sent it, unless it has not started
    #   the piece.
    # - A rank starts piece p when it has finished all pieces up to p - WINDOW, whose receives are earlier, and
    #   when what it sent of piece p - WINDOW has left. That needs receivers which have started p - WINDOW; one
    #   that has not is stuck at a receive of an older piece, which is earlier still.
    def start(piece: int) -> int:
        return piece // WINDOW * max(steps, WINDOW) + piece % WINDOW

    receives = [at for at, instruction in enumerate(instructions) if isinstance(instruction, Receive)]
    keys = [
        (start(number) + step_of[at], number, at)
        for number, piece in enumerate(pieces)
        for at in receives
        if piece[instructions[at].chunk]
    ]
    return [(number, at) for _, number, at in sorted(keys)]


def _residuals(instructions: Sequence[Instruction]) -> tuple[frozenset[int], frozenset[int]]:
    # The residual belongs to the rank's own contribution: it joins where the input is read and is settled by the
    # chunk's encoding, or becomes zero where the contribution leaves unencoded.
    reads: dict[int, int] = {}
    encodes: dict[int, int] = {}
    for at, instruction in enumerate(instructions):
        match instruction:
            case Encode(chunk=chunk):
                reads.setdefault(chunk, at)
                encodes.setdefault(chunk, at)
            case Reduce(chunk=chunk, local=local, payload_id=box):
                if local is Local.INPUT:
                    reads.setdefault(chunk, at)
                if box is not None:
                    encodes.setdefault(chunk, at)
            case _:
                pass
    leaves = {encodes.get(chunk, at) for chunk, at in reads.items()}
    return frozenset(reads.values()), frozenset(leaves)
