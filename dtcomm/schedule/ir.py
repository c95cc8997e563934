"""A collective as data: who sends which chunk to whom in which step, to be added or to be copied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dtcomm.errors import ScheduleError

Op = Literal["reduce", "copy"]

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
)
REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# The others take the user's shards as chunks, each encoded on a grid of its own.
CUT_AT_GRANULES = frozenset({"all_reduce", "broadcast", "reduce"})


class WireFormat(Protocol):
    """What a schedule needs to know of a codec (``dtcomm.codecs`` has them)."""

    @property
    def granularity(self) -> int:
        """Elements of one granule: where a payload may be cut."""

    def wire_bytes(self, numel: int, dtype: Any = ..., /) -> int:
        """Bytes of the payload of ``numel`` elements."""


def common_granularity(codec: WireFormat | Sequence[WireFormat]) -> int:
    """Where the payloads of all levels may be cut."""
    return math.lcm(*(each.granularity for each in (codec if isinstance(codec, Sequence) else [codec])))


@dataclass(frozen=True)
class Transfer:
    """In ``step``, ``src`` sends its version of ``chunk`` to ``dst``, which adds (reduce) or adopts (copy).

    ``level`` is the level of the hierarchy that the bytes cross; each level may have its own codec.
    """

    step: int
    src: int
    dst: int
    chunk: int
    op: Op
    level: int = 0

    def __str__(self) -> str:
        level = f" level {self.level}" if self.level else ""
        return f"step {self.step}: rank {self.src} -> rank {self.dst} chunk {self.chunk} {self.op}{level}"

    @property
    def key(self) -> tuple[int, int, int, int, str, int]:
        """The order of transfers in a schedule: by step, then sender, then chunk, then receiver."""
        return (self.step, self.src, self.chunk, self.dst, self.op, self.level)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A collective over ``ranks`` ranks, its tensor cut into ``chunks`` chunks; keeps ``transfers`` sorted.

    A chunk is a rank's shard for gather and scatter collectives and ``src * ranks + dst`` for all_to_all.
    Raises ``ScheduleError`` where a transfer names a rank, chunk, op or step that does not exist. Whether the
    transfers do what the collective promises is for ``dtcomm.schedule.verify`` to say.
    """

    collective: str
    ranks: int
    chunks: int
    root: int = 0
    transfers: tuple[Transfer, ...] = ()

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(f"collective: {self.collective!r} is not one of {', '.join(COLLECTIVES)}")
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(
                f"ranks and chunks must be at least 1, got ranks={self.ranks} chunks={self.chunks}"
            )
        if not 0 <= self.root < self.ranks:
            raise ValueError(f"root: {self.root} is not a rank of 0..{self.ranks - 1}")
        if self.root and self.collective not in ROOTED:
            raise ValueError(f"root: {self.collective} has none, got {self.root}")
        fixed = self.ranks**2 if self.collective == "all_to_all" else self.ranks
        if self.collective not in CUT_AT_GRANULES and self.chunks != fixed:
            raise ValueError(
                f"chunks: {self.collective} over {self.ranks} ranks has {fixed}, got {self.chunks}"
            )
        for transfer in self.transfers:
            self._check(transfer)
        object.__setattr__(self, "transfers", tuple(sorted(self.transfers, key=lambda t: t.key)))

    def _check(self, t: Transfer) -> None:
        if not 0 <= t.src < self.ranks or not 0 <= t.dst < self.ranks:
            raise ScheduleError(f"{t}: ranks are 0..{self.ranks - 1}")
        if not 0 <= t.chunk < self.chunks:
            raise ScheduleError(f"{t}: chunks are 0..{self.chunks - 1}")
        if t.src == t.dst:
            raise ScheduleError(f"{t}: a rank does not send to itself")
        if t.op not in ("reduce", "copy"):
            raise ScheduleError(f"{t}: op is reduce or copy")
        if t.op == "reduce" and self.collective not in REDUCING:
            raise ScheduleError(f"{t}: {self.collective} adds nothing up")
        if t.step < 0 or t.level < 0:
            raise ScheduleError(f"{t}: steps and levels count from 0")

    @property
    def steps(self) -> int:
        """How many steps there are; they count from 0."""
        return self.transfers[-1].step + 1 if self.transfers else 0

    def starts(self, rank: int, chunk: int) -> bool:
        """Whether ``rank`` has an input for ``chunk``."""
        match self.collective:
            case "all_gather" | "gather":
                return rank == chunk
            case "broadcast" | "scatter":
                return rank == self.root
            case "all_to_all":
                return rank == chunk // self.ranks
            case _:
                return True

    def ends(self, rank: int, chunk: int) -> bool:
        """Whether ``rank`` has an output for ``chunk``."""
        match self.collective:
            case "reduce_scatter" | "scatter":
                return rank == chunk
            case "reduce" | "gather":
                return rank == self.root
            case "all_to_all":
                return rank == chunk % self.ranks
            case _:
                return True

    def contributors(self, chunk: int) -> tuple[int, ...]:
        """The ranks whose inputs make up the outputs of ``chunk``: each exactly once."""
        return tuple(rank for rank in range(self.ranks) if self.starts(rank, chunk))

    def chunk_numel(self, chunk: int, numel: int, granularity: int) -> int:
        """Elements of ``chunk`` of a tensor of ``numel`` elements: a shard, or a share of its granules."""
        if self.collective not in CUT_AT_GRANULES:
            if numel % self.ranks:
                raise ValueError(f"numel: {numel} does not divide into {self.ranks} shards")
            return numel // self.ranks
        granules = -(-numel // granularity)
        begin = granules * chunk // self.chunks * granularity
        end = granules * (chunk + 1) // self.chunks * granularity
        return min(end, numel) - min(begin, numel)

    def bytes_on_wire(
        self, numel: int, codec: WireFormat | Sequence[WireFormat], dtype: Any = None
    ) -> tuple[int, ...]:
        """Bytes that each rank sends for a tensor of ``numel`` elements.

        ``numel`` counts the whole tensor: the input of reduce_scatter and scatter, the output of all_gather
        and gather, one rank's input of all_to_all. ``codec`` may be one per level. ``dtype`` is handed to
        ``codec.wire_bytes`` where given. A payload sent to two peers counts twice.

        A codec whose terms are added on common ground (``exact``, ``randk:positions=shared``) says itself what
        messages a sum takes. The exponents of ``exact`` are counted as running through this schedule: right for
        all_reduce; those of the others are agreed by an all_reduce of their own.
        """
        if self.collective in REDUCING and getattr(codec, "needs_agreement", False):
            return self._bytes_of_terms(numel, codec)
        sent = [0] * self.ranks
        for transfer, level in self._levels():
            sent[transfer.src] += self.payload_bytes(transfer.chunk, numel, codec, level, dtype)
        return tuple(sent)

    def _bytes_of_terms(self, numel: int, codec: Any) -> tuple[int, ...]:
        shards = 1 if self.collective in CUT_AT_GRANULES else self.ranks
        sent = [
            self.bytes_on_wire(count * shards, each, dtype)
            for count, each, dtype in codec.sum_messages(numel // shards)
        ]
        return tuple(map(sum, zip(*sent, strict=True)))

    def payload_bytes(
        self,
        chunk: int,
        numel: int,
        codec: WireFormat | Sequence[WireFormat],
        level: int = 0,
        dtype: Any = None,
    ) -> int:
        """Bytes of one payload of ``chunk``; arguments as in ``bytes_on_wire``."""
        layouts = codec if isinstance(codec, Sequence) else [codec] * (level + 1)
        layout = layouts[level]
        elements = self.chunk_numel(chunk, numel, common_granularity(codec))
        return layout.wire_bytes(elements) if dtype is None else layout.wire_bytes(elements, dtype)

    def requantizations(self) -> int:
        """How many encodings the most often encoded contribution goes through on its way to an output."""
        from dtcomm.schedule.trace import trace

        return trace(self).requantizations()

    def _levels(self) -> Iterator[tuple[Transfer, int]]:
        # A payload that is passed on keeps the codec that it was encoded with.
        from dtcomm.schedule.trace import trace

        for version in trace(self).versions:
            for transfer in version.sends:
                yield transfer, version.level

    def __str__(self) -> str:
        from dtcomm.schedule.text import write

        return write(self)
