"""Layout of a program's chunks in the tensors of an operation, and the pieces that they are cut into.

The native engine cuts in the same way (csrc/engine/plan.h), so an element's bytes do not depend on the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from dtcomm.runtime.types import OpSpec


class Slice(NamedTuple):
    """A run of elements of one tensor of the message, encoded on its own.

    ``part`` is the tensor; offsets into the input and the output count elements. ``wire_offset`` and ``wire_bytes``
    place its payload in the chunk's payload at level 0, ``above`` at the level between hosts.
    """

    part: int
    in_offset: int
    out_offset: int
    numel: int
    wire_offset: int
    wire_bytes: int
    above: tuple[int, int] = (0, 0)

    def place(self, level: int) -> tuple[int, int]:
        """(offset, bytes) in the chunk's payload at a level."""
        return self.above if level else (self.wire_offset, self.wire_bytes)


Chunk = tuple[Slice, ...]
Piece = tuple[Chunk, ...]


def payload_bytes(chunk: Chunk, level: int = 0) -> int:
    """Bytes of a chunk's payload in one piece; 0 if the piece contains nothing of the chunk."""
    return sum(chunk[-1].place(level)) if chunk else 0


def lay_out(spec: OpSpec, chunks: int, elements: int) -> tuple[Piece, ...]:
    """The pieces of an operation in order, each with the slices of every chunk.

    A piece takes from each chunk the next whole granules until it has at least ``elements`` of it, or until the chunk
    ends: short chunks are empty in the last pieces.
    """
    columns = [list(_pieces(spec, chunk, chunks, elements)) for chunk in range(chunks)]
    rows = max(map(len, columns))
    return tuple(tuple(column[row] if row < len(column) else () for column in columns) for row in range(rows))


def piece_elements(spec: OpSpec, chunks: int, message_bytes: int) -> int:
    """The number of elements of a chunk that a piece takes.

    No message but the last is smaller than ``message_bytes`` bytes, and all are about equal.
    """
    unit = min((part.granularity for part in spec.parts), default=1)
    least = 1
    for part in spec.parts:
        granule = part.granularity
        least = max(least, -(-message_bytes // part.codec.wire_bytes(granule, part.dtype)) * granule)
    longest = max(sum(run.numel for run in _runs(spec, chunk, chunks)) for chunk in range(chunks))
    even = -(-longest // max(1, longest // least))
    return max(unit, -(-even // unit) * unit)


def _runs(spec: OpSpec, chunk: int, chunks: int) -> Iterator[Slice]:
    # A tensor is cut at its own granules, so which rank sums an element does not depend on what else is in the
    # message; the shards of a scatter or gather are the caller's.
    for index, part in enumerate(spec.parts):
        start_in = start_out = 0
        numel = part.numel
        if spec.collective in ("reduce_scatter", "scatter"):
            start_in = chunk * numel
        elif spec.collective in ("all_gather", "gather"):
            start_out = chunk * numel
        elif spec.collective == "all_to_all":
            start_in, start_out, numel = _exchanged(spec, numel, chunk, math.isqrt(chunks))
        else:
            granule = part.granularity
            granules = -(-part.numel // granule)
            start_in = start_out = min(numel, granules * chunk // chunks * granule)
            numel = min(numel, granules * (chunk + 1) // chunks * granule) - start_in
        if numel:
            yield Slice(index, start_in, start_out, numel, 0, 0)


def _exchanged(spec: OpSpec, numel: int, chunk: int, ranks: int) -> tuple[int, int, int]:
    # Offsets into the sender's input and the receiver's output, and the number of elements.
    src, dst = divmod(chunk, ranks)
    if not spec.splits:
        return dst * numel, src * numel, numel
    sent = spec.splits[src * ranks : chunk]
    received = spec.splits[dst:chunk:ranks]
    return sum(sent), sum(received), spec.splits[chunk]


def _pieces(spec: OpSpec, chunk: int, chunks: int, elements: int) -> Iterator[Chunk]:
    slices: list[Slice] = []
    left = elements  # to take in the current piece
    for run in _runs(spec, chunk, chunks):
        part = spec.parts[run.part]
        done = 0
        while done < run.numel:
            if left <= 0:
                yield tuple(slices)
                slices, left = [], elements
            whole = -(-left // part.granularity) * part.granularity
            take = min(run.numel - done, whole)
            slices.append(
                Slice(
                    run.part,
                    run.in_offset + done,
                    run.out_offset + done,
                    take,
                    payload_bytes(tuple(slices[-1:])),
                    part.codec.wire_bytes(take, part.dtype),
                    (payload_bytes(tuple(slices[-1:]), 1), part.at(1).wire_bytes(take, part.dtype)),
                )
            )
            done += take
            left -= take
    if slices:
        yield tuple(slices)
