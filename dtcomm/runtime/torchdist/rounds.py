"""Plans of the executor: a program laid over the tensors of one operation and cut into rounds.

In a round a rank computes, hands bytes to its group in one go, and computes from what arrived. A group's collectives
are faster than its messages and take one launch, so a step in which every rank sends to every other one becomes an
all_to_all or an all_gather of bytes. All ranks derive that from the same schedule.

`arithmetic` is the computation: what the instructions do to this rank's tensors.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from dtcomm.runtime.types import ElementRange, OpSpec
from dtcomm.schedule import Schedule, lower
from dtcomm.schedule.ir import CUT_AT_GRANULES, Origin, Version, trace
from dtcomm.schedule.lower import (
    Encode,
    Forward,
    Instruction,
    Local,
    Receive,
    Reduce,
    Send,
    steps,
)
from dtcomm.streams import HOST_CALL_US, HOST_KERNEL_US

ALL_TO_ALL, ALL_GATHER, MESSAGES, NOTHING = "all_to_all", "all_gather", "messages", ""
ALIGNMENT = 64
# On a device p pieces hide all but 1/p of what runs beside the slowest link, and each takes the host a launch and a
# call of NCCL for each round. The sum of both is least at the square root of their ratio.
CODEC_BYTES_PER_SECOND = 1e12  # of tensors and payloads, which are encoded and decoded
INSIDE_BYTES_PER_SECOND = 25e9  # of rounds inside a host, beside those between hosts
MAX_DEVICE_PIECES = 8
# On hosts a smaller message costs more than its bytes do, and a larger one leaves nothing to overlap; in between a
# chunk is cut into about eight messages.
MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES = 256 * 1024, 1024 * 1024
# Pieces that a host starts before it waits for the first: a peer whose core is busy then does not stop this rank.
HOST_LOOKAHEAD = 2
CHECKSUM_BYTES = 4
WHOLE = 2**62  # payload bytes that no piece has: one piece

PayloadKey = tuple[int, int]  # (rank, number of the payload among those that the rank encodes)
SizedChunk = tuple[int, int]  # (chunk, level), which gives the payload's size in a piece


class Slice(NamedTuple):
    """Consecutive elements of one tensor of the message, encoded on their own.

    ``part`` is the tensor; offsets into the input and the output count elements. ``inside`` and ``between`` are
    (offset, bytes) in the chunk's payload inside a host and between hosts.
    """

    part: int
    in_offset: int
    out_offset: int
    numel: int
    inside: tuple[int, int]
    between: tuple[int, int]

    def span(self, level: int) -> tuple[int, int]:
        """(offset, bytes) in the chunk's payload at a level: 0 is inside a host, 1 between hosts."""
        return self.between if level else self.inside


Chunk = tuple[Slice, ...]
Piece = tuple[Chunk, ...]


class Payload(NamedTuple):
    """A payload that goes to or comes from a peer."""

    peer: int
    key: PayloadKey
    chunk: SizedChunk


class Round(NamedTuple):
    """One step of a rank.

    ``before`` and ``after`` are the computations before and after the exchange, as (position in the program,
    instruction). ``kind`` is how the group is used. ``all_payloads`` is what each rank contributes to an all_gather.
    ``forwards`` are payloads that are passed on, each with the payload that it is a copy of.
    """

    before: tuple[tuple[int, Instruction], ...]
    kind: str
    sends: tuple[Payload, ...]
    receives: tuple[Payload, ...]
    after: tuple[tuple[int, Instruction], ...]
    all_payloads: tuple[SizedChunk, ...] = ()
    forwards: tuple[tuple[PayloadKey, PayloadKey], ...] = ()


class Region(NamedTuple):
    """Where the bytes of a round lie in a piece's memory; ``sizes`` are bytes by rank."""

    start: int
    sizes: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The end of the region."""
        return self.start + sum(self.sizes)


class RoundsPlan:
    """The plan of one operation for one rank.

    Attributes:
        rounds: The rounds that every one of ``pieces`` goes through.
        order: (piece, round) in the order in which all ranks hand rounds to the group. Each piece is ``lookahead``
            rounds behind the one before it, and the newest piece comes first, so that its encoding overlaps the
            exchange of the others. A round reads only what earlier rounds of this order have brought, on any rank,
            so ranks cannot wait in a circle.
        places: For each piece, the byte offset of each payload in the piece's memory of ``memory_bytes``.
        sums: For each piece, the byte offset of each slice of a chunk's partial sum there, by chunk.
        regions: For each piece and round, the regions that are sent and received.
        residual_reads, residual_writes: Positions of the instructions that read and rewrite the residual.
        fingerprint: A number that makes the tags of different operations differ, so that a message is never received
            into a buffer meant for another operation.
        sent_to: Bytes that this rank sends to each rank in one call; the padding of an all_gather is not counted.
        sent_bytes: Their sum.

    Args:
        message_bytes: Payload bytes of a chunk that a piece takes at least; 0: chosen by size for a device.
        collectives: Whether steps may become collectives of the group; otherwise all are messages.
    """

    def __init__(
        self,
        spec: OpSpec,
        schedule: Schedule,
        rank: int,
        message_bytes: int = 0,
        collectives: bool = True,
        lookahead: int = 1,
    ) -> None:
        program = lower(schedule, rank)
        self.spec, self.text = spec, str(spec)
        self.rank, self.ranks = rank, schedule.ranks
        self.instructions = program.instructions
        self.divisor = program.ranks if spec.op == "avg" else 1
        self.op = "sum" if spec.op == "avg" else spec.op
        self.pieces: tuple[Piece, ...] = ()
        if spec.parts:
            least = message_bytes or device_message_bytes(spec, schedule)
            elements = piece_elements(spec, program.chunks, self.ranks, least)
            self.pieces = cut_into_pieces(spec, program.chunks, self.ranks, elements)
        self.residual_reads, self.residual_writes = _residual_positions(self.instructions)
        self.rounds = tuple(_rounds(schedule, rank, self.instructions, collectives))
        self.order = [(piece, at) for piece in range(len(self.pieces)) for at in range(len(self.rounds))]
        self.order.sort(key=lambda step: (step[0] + lookahead * step[1], -step[0]))
        self.fingerprint = zlib.crc32(self.text.encode())
        self.places: list[dict[PayloadKey, int]] = []
        self.sums: list[dict[int, list[int]]] = []
        self.steps: dict[tuple[int, int, bool], list[Any]] = {}  # what `arithmetic.steps` returned
        self.regions: list[list[tuple[Region, Region]]] = []
        self.memory_bytes: list[int] = []
        self.sent_to = [0] * self.ranks
        for piece in self.pieces:
            self._place(piece)
        self.sent_bytes = sum(self.sent_to)

    @property
    def table_bytes(self) -> int:
        """The memory that the plan itself takes, counting an entry of a table as 200 bytes."""
        entries = len(self.order) + sum(map(len, self.places))
        for piece in self.pieces:
            entries += sum(map(len, piece))
        return 200 * entries

    def _place(self, piece: Piece) -> None:
        places: dict[PayloadKey, int] = {}
        regions: list[tuple[Region, Region]] = []
        at = 0

        def size(chunk: SizedChunk) -> int:
            return payload_bytes(piece[chunk[0]], chunk[1])

        def region_of(payloads: Sequence[Payload]) -> Region:
            nonlocal at
            sizes, start = [0] * self.ranks, at
            for payload in payloads:  # in order of their peers
                places[payload.key] = at
                sizes[payload.peer] = size(payload.chunk)
                at += sizes[payload.peer]
            at = _aligned(at)
            return Region(start, tuple(sizes))

        for round_ in self.rounds:
            for key, source in round_.forwards:
                places[key] = places[source]
            if round_.kind == ALL_TO_ALL:
                regions.append((region_of(round_.sends), region_of(round_.receives)))
            elif round_.kind == ALL_GATHER:
                largest = max(map(size, round_.all_payloads))
                region = Region(at, (largest,) * self.ranks)
                for payload in (*round_.receives, round_.sends[0]._replace(peer=self.rank)):
                    places[payload.key] = at + payload.peer * largest
                at = _aligned(region.stop)
                regions.append((Region(region.start + self.rank * largest, (largest,)), region))
            else:
                regions.append((Region(at, ()), Region(at, ())))
                for payload in (*round_.sends, *round_.receives):
                    if payload.key not in places:
                        places[payload.key] = at
                        at = _aligned(at + size(payload.chunk))
        sums: dict[int, list[int]] = {}
        for instruction in self.instructions:
            if isinstance(instruction, Reduce) and instruction.keep_partial_sum:
                sums[instruction.chunk] = []
                for part_slice in piece[instruction.chunk]:
                    sums[instruction.chunk].append(at)
                    dtype = accumulator_dtype(self.spec.parts[part_slice.part].dtype)
                    at = _aligned(at + part_slice.numel * dtype.itemsize)
        self.places.append(places)
        self.sums.append(sums)
        self.regions.append(regions)
        self.memory_bytes.append(at)
        for round_ in self.rounds:
            for payload in round_.sends:
                nbytes = size(payload.chunk)
                self.sent_to[payload.peer] += nbytes + (
                    CHECKSUM_BYTES if self.spec.checksum and nbytes else 0
                )


def cut_into_pieces(spec: OpSpec, chunks: int, ranks: int, elements: int) -> tuple[Piece, ...]:
    """The pieces of an operation in order, each with the slices of every chunk.

    A piece has at least ``elements`` elements of each chunk or its rest: short chunks are empty in the last pieces.
    """
    layout = spec.lay_out(chunks, ranks, elements)
    return tuple(
        tuple(_slices(spec, pieces[index]) if index < len(pieces) else () for pieces in layout)
        for index in range(max(map(len, layout)))
    )


def _slices(spec: OpSpec, ranges: Sequence[ElementRange]) -> Chunk:
    slices = []
    end_inside = end_between = 0
    for index, in_offset, out_offset, numel in ranges:
        part = spec.parts[index]
        inside = end_inside, part.at(0).wire_bytes(numel, part.dtype)
        between = end_between, part.at(1).wire_bytes(numel, part.dtype)
        slices.append(Slice(index, in_offset, out_offset, numel, inside, between))
        end_inside, end_between = sum(inside), sum(between)
    return tuple(slices)


def payload_bytes(chunk: Chunk, level: int = 0) -> int:
    """Bytes of a chunk's payload in one piece; 0 if the piece contains nothing of the chunk."""
    return sum(chunk[-1].span(level)) if chunk else 0


def piece_elements(spec: OpSpec, chunks: int, ranks: int, message_bytes: int) -> int:
    """The number of elements of a chunk that a piece takes.

    No message but the last is smaller than ``message_bytes`` bytes, and all are about equal.
    """
    unit = min((part.granularity for part in spec.parts), default=1)
    least = 1
    for part in spec.parts:
        granule = part.granularity
        least = max(least, -(-message_bytes // part.codec.wire_bytes(granule, part.dtype)) * granule)
    longest = max(
        sum(numel for piece in chunk for _, _, _, numel in piece) for chunk in spec.lay_out(chunks, ranks)
    )
    even = -(-longest // max(1, longest // least))
    return max(unit, -(-even // unit) * unit)


def device_message_bytes(spec: OpSpec, schedule: Schedule) -> int:
    """Payload bytes of a chunk that a piece takes on a device: those of all chunks decide the number of pieces."""
    chunk = max(spec.chunk_payload_bytes(schedule.chunks, schedule.ranks), default=0)
    whole = 1 if schedule.collective in CUT_AT_GRANULES else schedule.chunks
    tensors = sum(part.numel * part.dtype.itemsize for part in spec.parts) * whole
    levels = any(transfer.level for transfer in schedule.transfers)
    return max(1, -(-chunk // device_pieces(tensors, chunk * schedule.chunks, schedule.steps, levels)))


def device_pieces(tensor_bytes: int, payload_bytes: int, steps: int, levels: bool) -> int:
    """The number of pieces of a message on a device; ``levels``: there are steps inside hosts and between them."""
    hidden = (tensor_bytes + payload_bytes) / CODEC_BYTES_PER_SECOND
    hidden += levels * payload_bytes / INSIDE_BYTES_PER_SECOND
    piece = (steps * HOST_CALL_US + (steps + 1) * HOST_KERNEL_US) * 1e-6
    return min(max(round(math.sqrt(hidden / piece)), 1), MAX_DEVICE_PIECES)


def host_message_bytes(spec: OpSpec, schedule: Schedule) -> int:
    """Payload bytes of a chunk that a piece takes where the host sends messages."""
    payload = sum(part.codec.wire_bytes(part.numel, part.dtype) for part in spec.parts)
    if schedule.collective in CUT_AT_GRANULES:
        payload //= schedule.chunks
    return min(max(payload // 8, MIN_MESSAGE_BYTES), MAX_MESSAGE_BYTES)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rounds(
    schedule: Schedule, rank: int, instructions: Sequence[Instruction], collectives: bool
) -> Iterator[Round]:
    step_of = steps(schedule, rank)
    kinds = _collective_kinds(schedule) if collectives else {}
    for step in range(schedule.steps + 1):  # the last one has the computations on what is never sent
        before: list[tuple[int, Instruction]] = []
        after: list[tuple[int, Instruction]] = []
        sends: list[Payload] = []
        receives: list[Payload] = []
        forwards: list[tuple[PayloadKey, PayloadKey]] = []
        for at, instruction in enumerate(instructions):
            if step_of[at] != step:
                continue
            match instruction:
                case Send(chunk=chunk, payload_id=payload_id, peers=peers, level=level):
                    sends += [Payload(peer, (rank, payload_id), (chunk, level)) for peer in peers]
                case Receive(chunk=chunk, peer=peer, payload_id=payload_id, level=level):
                    receives.append(Payload(peer, (peer, payload_id), (chunk, level)))
                case Forward(peer=peer, source_id=source, payload_id=payload_id):
                    forwards.append(((rank, payload_id), (peer, source)))
                case _:
                    (after if receives else before).append((at, instruction))
        kind, all_payloads = kinds.get(step, (MESSAGES, ()))
        if kind == MESSAGES and not sends and not receives:
            kind = NOTHING
        yield Round(
            tuple(before),
            kind,
            tuple(sorted(sends)),
            tuple(sorted(receives)),
            tuple(after),
            all_payloads,
            tuple(forwards),
        )


def _collective_kinds(schedule: Schedule) -> dict[int, tuple[str, tuple[SizedChunk, ...]]]:
    """The steps that are an all_to_all or an all_gather of the group, the same on all ranks."""
    ranks = schedule.ranks
    sent: dict[int, dict[tuple[int, int], list[Version]]] = {}
    for version in trace(schedule).versions:
        for transfer in version.sends:
            sent.setdefault(transfer.step, {}).setdefault((transfer.src, transfer.dst), []).append(version)
    kinds: dict[int, tuple[str, tuple[SizedChunk, ...]]] = {}
    for step, pairs in sent.items():
        versions = [version for of_pair in pairs.values() for version in of_pair]
        if len(versions) != ranks * (ranks - 1) or len(pairs) != len(versions):
            continue
        if any(
            version.origin is Origin.COPY or any(transfer.step != step for transfer in version.sends)
            for version in versions
        ):
            continue
        if len(set(map(id, versions))) == len(versions):
            kinds[step] = ALL_TO_ALL, ()
        elif len(set(map(id, versions))) == ranks:
            by_rank = {version.rank: (version.chunk, version.level) for version in versions}
            kinds[step] = ALL_GATHER, tuple(by_rank[rank] for rank in range(ranks))
    return kinds


def _residual_positions(instructions: Sequence[Instruction]) -> tuple[frozenset[int], frozenset[int]]:
    # The residual belongs to the rank's own contribution: it is added where the input is read, and rewritten by the
    # chunk's encoding or set to zero where the contribution leaves unencoded.
    reads: dict[int, int] = {}
    encodes: dict[int, int] = {}
    for at, instruction in enumerate(instructions):
        match instruction:
            case Encode(chunk=chunk):
                reads.setdefault(chunk, at)
                encodes.setdefault(chunk, at)
            case Reduce(chunk=chunk, local=local, payload_id=payload_id):
                if local is Local.INPUT:
                    reads.setdefault(chunk, at)
                if payload_id is not None:
                    encodes.setdefault(chunk, at)
            case _:
                pass
    writes = {encodes.get(chunk, at) for chunk, at in reads.items()}
    return frozenset(reads.values()), frozenset(writes)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which an unencoded sum of ``dtype`` is kept between instructions."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
