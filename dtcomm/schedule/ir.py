"""The schedule of a collective and its meaning.

`Schedule` and `Transfer` are the intermediate representation between algorithms, which build schedules, and everything
that reads them: the verifier, the simulator, the planner and, through `lower`, the runtimes.

`trace` defines what a schedule means. Every (rank, chunk) holds a *version*; version 0 is the input. The transfers of a
step read the versions held when the step began. All ``reduce`` transfers into one (rank, chunk) of a step form,
together with the receiver's own version, ONE fp32 sum in rank order. A version is encoded at most once, when it is
first sent, and every reader from then on, the owner included, reads the decoded bytes. ``copy`` keeps the encoded bytes
unchanged.

The step that reads a version last overwrites it, so its owner never reads it before it is first sent. Therefore either
a version is sent at some time and every rank reads it decoded, or it is never sent and only its owner reads it.

A schedule has a text form, which ``str(schedule)`` writes and `parse` reads: one rank per row, one step per column.

    all_reduce ranks=3 chunks=3
    rank 0 | c2+1 | c1+1 | c0=1 | c2=1
    rank 1 | c0+2 | c2+2 | c1=2 | c0=2
    rank 2 | c1+0 | c0+0 | c2=0 | c1=0

A cell lists what the rank sends in that step: ``c2+1`` adds chunk 2 to rank 1's, ``c0=1,2`` copies chunk 0 to ranks 1
and 2, ``c0+1@1`` crosses level 1 of the hierarchy, ``.`` means that the rank sends nothing. ``root=`` is written if it
is not 0.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
# The chunks of these are shares of the tensor's granules. The chunks of the others are the user's shards, each encoded
# on a grid of its own.
CUT_AT_GRANULES = frozenset({"all_reduce", "broadcast", "reduce"})
# How the text form of a schedule writes an op.
OP_SIGNS: dict[Op, str] = {"reduce": "+", "copy": "="}


class WireFormat(Protocol):
    """The part of a codec that a schedule needs; `dtcomm.codecs` has the implementations."""

    @property
    def granularity(self) -> int:
        """Elements of one granule: a payload may be cut at multiples of it."""

    def wire_bytes(self, numel: int, dtype: Any = ..., /) -> int:
        """Return the bytes of the payload of ``numel`` elements."""


def common_granularity(codec: WireFormat | Sequence[WireFormat]) -> int:
    """Return the number of elements at whose multiples the payloads of all levels may be cut."""
    codecs = codec if isinstance(codec, Sequence) else [codec]
    return math.lcm(*(level_codec.granularity for level_codec in codecs))


@dataclass(frozen=True)
class Transfer:
    """One chunk sent from one rank to another.

    Args:
        step: The step of the schedule, counted from 0.
        src: The rank that sends its version of the chunk.
        dst: The rank that receives it.
        chunk: The index of the chunk.
        op: ``"reduce"`` adds the chunk to the receiver's version; ``"copy"`` replaces the receiver's version.
        level: The level of the hierarchy that the bytes cross: 0 inside a host, 1 between hosts. Each level may have
            its own codec.

    Example:
        >>> from dtcomm.schedule import Transfer
        >>> print(Transfer(0, 1, 2, 0, "reduce"))
        step 0: rank 1 -> rank 2 chunk 0 reduce
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
        """The sort key of transfers in a schedule: step, sender, chunk, receiver."""
        return (self.step, self.src, self.chunk, self.dst, self.op, self.level)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A collective over a number of ranks, as a list of transfers.

    The constructor checks that every transfer names existing ranks, chunks, ops and steps. Whether the transfers do
    what the collective promises is for `dtcomm.schedule.verify` to prove. ``str(schedule)`` is the text form, one rank
    per row and one step per column; `dtcomm.schedule.parse` reads it back.

    Args:
        collective: One of all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter and all_to_all.
        ranks: The number of ranks, at least 1.
        chunks: How many chunks the tensor is cut into. It is free for all_reduce, broadcast and reduce. A chunk of
            gather, scatter, all_gather and reduce_scatter is a rank's shard, so there are ``ranks`` of them. A chunk of
            all_to_all is ``src * ranks + dst``.
        root: The root of broadcast, reduce, gather and scatter; 0 for the others.
        transfers: The transfers in any order; they are kept sorted.

    Raises:
        ValueError: If an argument is out of range.
        ScheduleError: If a transfer names a rank, chunk, op or step that does not exist.

    Example:
        >>> from dtcomm.schedule import Schedule, Transfer
        >>> swap = (Transfer(0, 0, 1, 0, "reduce"), Transfer(0, 1, 0, 0, "reduce"))
        >>> print(Schedule(collective="all_reduce", ranks=2, chunks=1, transfers=swap))
        all_reduce ranks=2 chunks=1
        rank 0 | c0+1
        rank 1 | c0+0
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
        expected = self.ranks**2 if self.collective == "all_to_all" else self.ranks
        if self.collective not in CUT_AT_GRANULES and self.chunks != expected:
            raise ValueError(
                f"chunks: {self.collective} over {self.ranks} ranks has {expected}, got {self.chunks}"
            )
        for transfer in self.transfers:
            self.check(transfer)
        object.__setattr__(self, "transfers", tuple(sorted(self.transfers, key=lambda t: t.key)))

    def __hash__(self) -> int:
        # Plans are cached by schedule, so this is part of every call. Hashing the transfers would take longer than it.
        return hash((self.ranks, self.chunks, self.root, len(self.transfers)))

    def check(self, t: Transfer) -> None:
        """Raise ScheduleError if a transfer names a rank, chunk, op or step that this schedule does not have."""
        if not 0 <= t.src < self.ranks or not 0 <= t.dst < self.ranks:
            raise ScheduleError(f"{t}: ranks are 0..{self.ranks - 1}")
        if not 0 <= t.chunk < self.chunks:
            raise ScheduleError(f"{t}: chunks are 0..{self.chunks - 1}")
        if t.src == t.dst:
            raise ScheduleError(f"{t}: a rank does not send to itself")
        if t.op not in ("reduce", "copy"):
            raise ScheduleError(f"{t}: op is reduce or copy")
        if t.op == "reduce" and self.collective not in REDUCING:
            raise ScheduleError(f"{t}: {self.collective} does not reduce")
        if t.step < 0 or t.level < 0:
            raise ScheduleError(f"{t}: steps and levels count from 0")

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.transfers[-1].step + 1 if self.transfers else 0

    def starts(self, rank: int, chunk: int) -> bool:
        """Return whether ``rank`` has an input for ``chunk``."""
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
        """Return whether ``rank`` has an output for ``chunk``."""
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
        """Return the ranks whose inputs must be in every output of ``chunk``, each exactly once."""
        return tuple(rank for rank in range(self.ranks) if self.starts(rank, chunk))

    def chunk_numel(self, chunk: int, numel: int, granularity: int) -> int:
        """Return the elements of ``chunk`` in a tensor of ``numel`` elements: a shard, or a share of its granules."""
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
        """Return the bytes that each rank sends; a payload sent to two peers counts twice.

        A codec whose ranks agree on a representation first (``exact``, ``randk:positions=shared``) states itself which
        messages a sum takes. The exponents of ``exact`` are counted as if they ran through this schedule. That is right
        for all_reduce; the other collectives agree on exponents by an all_reduce of their own.

        Args:
            numel: The elements of the whole tensor: the input of reduce_scatter and scatter, the output of all_gather
                and gather, one rank's input of all_to_all.
            codec: One codec, or one for each level.
            dtype: The dtype of the elements; None leaves it to the codec's default.

        Returns:
            The bytes by rank.
        """
        if self.collective in REDUCING and getattr(codec, "needs_agreement", False):
            return self._bytes_with_agreement(numel, codec, dtype)
        sent = [0] * self.ranks
        for src, _, size in self._messages(numel, codec, dtype):
            sent[src] += size
        return tuple(sent)

    def bytes_leaving(
        self,
        hosts: Sequence[Sequence[int]],
        numel: int,
        codec: WireFormat | Sequence[WireFormat],
        dtype: Any = None,
    ) -> tuple[int, ...]:
        """Return the bytes that leave each host.

        Args:
            hosts: The ranks on each host.
            numel, codec, dtype: As `bytes_on_wire` takes them.

        Returns:
            The bytes by host.

        Example:
            >>> import dtcomm
            >>> from dtcomm import algorithms
            >>> schedule = algorithms.build("hierarchical", "all_reduce", 4, hosts=(2, 2))
            >>> schedule.bytes_leaving([[0, 1], [2, 3]], 4096, dtcomm.codec("none"))
            (16384, 16384)
        """
        host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        left = [0] * len(hosts)
        for src, dst, size in self._messages(numel, codec, dtype):
            if host_of[src] != host_of[dst]:
                left[host_of[src]] += size
        return tuple(left)

    def _messages(
        self, numel: int, codec: WireFormat | Sequence[WireFormat], dtype: Any
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (source, destination, bytes) of each message."""
        for version in trace(self).versions:
            # A payload that is passed on keeps the codec that it was encoded with.
            for transfer in version.sends:
                size = self.payload_bytes(transfer.chunk, numel, codec, version.level, dtype)
                yield transfer.src, transfer.dst, size

    def _bytes_with_agreement(self, numel: int, codec: Any, dtype: Any) -> tuple[int, ...]:
        shards = 1 if self.collective in CUT_AT_GRANULES else self.ranks
        sent = [
            self.bytes_on_wire(count * shards, message_codec, message_dtype)
            for count, message_codec, message_dtype in codec.sum_messages(
                numel // shards, self.collective, dtype
            )
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
        """Return the bytes of one payload of ``chunk``; the arguments are those of `bytes_on_wire`."""
        layouts = codec if isinstance(codec, Sequence) else [codec] * (level + 1)
        layout = layouts[level]
        elements = self.chunk_numel(chunk, numel, common_granularity(codec))
        return layout.wire_bytes(elements) if dtype is None else layout.wire_bytes(elements, dtype)

    def requantizations(self) -> int:
        """Return how many encodings the most often encoded contribution goes through before it reaches an output."""
        return trace(self).requantizations()

    def __str__(self) -> str:
        cells: dict[tuple[int, int], dict[tuple[int, str, int], list[int]]] = defaultdict(dict)
        for t in self.transfers:
            cells[t.src, t.step].setdefault((t.chunk, OP_SIGNS[t.op], t.level), []).append(t.dst)
        rows = [[f"rank {rank:>{len(str(self.ranks - 1))}}"] for rank in range(self.ranks)]
        for step in range(self.steps):
            column = [_cell(cells[rank, step]) for rank in range(self.ranks)]
            width = max(len(cell) for cell in column)
            for row, cell in zip(rows, column, strict=True):
                row.append(f"{cell:<{width}}")
        root = f" root={self.root}" if self.root else ""
        head = f"{self.collective} ranks={self.ranks} chunks={self.chunks}{root}"
        return "\n".join([head, *(" | ".join(row).rstrip() for row in rows)])


def _cell(sends: dict[tuple[int, str, int], list[int]]) -> str:
    if not sends:
        return "."
    return " ".join(
        f"c{chunk}{sign}{','.join(map(str, sorted(peers)))}{f'@{level}' if level else ''}"
        for (chunk, sign, level), peers in sends.items()
    )


class Origin(enum.Enum):
    """How a version came into being."""

    INPUT = "input"
    SUM = "sum"
    COPY = "copy"


@dataclass(eq=False, kw_only=True)
class Version:
    """The value that ``rank`` holds of ``chunk`` from the end of ``step`` on (-1: from the start).

    ``sources`` are the terms of a sum in rank order, the rank's own version among them, or the version that a copy
    replicates, in bytes of ``copied_level``'s codec. ``contributors`` and ``repeated`` are bit sets of ranks: those
    whose inputs are in the version, and those whose inputs are in it more than once. A version belongs to its `History`
    and is not to be changed.
    """

    rank: int
    chunk: int
    step: int
    origin: Origin
    sources: tuple[Version, ...] = ()
    contributors: int = 0
    repeated: int = 0
    copied_level: int = 0
    sends: list[Transfer] = field(default_factory=list)

    @property
    def encoded(self) -> bool:
        """Whether the rank itself encodes the version (a copy already consists of encoded bytes)."""
        return bool(self.sends) and self.origin is not Origin.COPY

    @property
    def first_sent(self) -> int | None:
        """The step that sends the version first, or None if no step sends it."""
        return self.sends[0].step if self.sends else None

    @property
    def level(self) -> int:
        """The level whose codec encodes the version; bytes that are passed on keep theirs."""
        if self.origin is Origin.COPY:
            return self.copied_level
        return self.sends[0].level if self.sends else 0


@dataclass(frozen=True)
class History:
    """All versions of a schedule in the order of their steps, and those that are the collective's outputs."""

    versions: tuple[Version, ...]
    outputs: dict[tuple[int, int], Version]

    def requantizations(self) -> int:
        """Return the largest number of encodings that any contribution to an output goes through."""
        encodings: dict[Version, int] = {}
        for version in self.versions:
            so_far = max((encodings[source] for source in version.sources), default=0)
            encodings[version] = so_far + version.encoded
        return max((encodings[version] for version in self.outputs.values()), default=0)


@functools.lru_cache(maxsize=32)
def trace(schedule: Schedule) -> History:
    """Play the transfers of a schedule step by step and return the versions that arise.

    Raises:
        ScheduleError: If a step reads a version that does not exist yet, or if the arrivals at one (rank, chunk) in one
            step have no meaning: two copies, a copy and a sum, the same transfer twice, two levels for one encoding.
    """
    current = {
        (rank, chunk): Version(rank=rank, chunk=chunk, step=-1, origin=Origin.INPUT, contributors=1 << rank)
        for rank, chunk in itertools.product(range(schedule.ranks), range(schedule.chunks))
        if schedule.starts(rank, chunk)
    }
    versions = list(current.values())
    for step, transfers in itertools.groupby(schedule.transfers, key=lambda t: t.step):
        arriving: dict[tuple[int, int], list[tuple[Transfer, Version]]] = {}
        for transfer in transfers:
            version = current.get((transfer.src, transfer.chunk))
            if version is None:
                raise ScheduleError(f"{transfer}: rank {transfer.src} does not hold this chunk yet")
            _record_send(version, transfer)
            arriving.setdefault((transfer.dst, transfer.chunk), []).append((transfer, version))
        created = {
            place: _arrival(step, current.get(place), arrivals)
            for place, arrivals in sorted(arriving.items())
        }
        current.update(created)
        versions += created.values()
    outputs = {place: version for place, version in current.items() if schedule.ends(*place)}
    return History(tuple(versions), outputs)


def _record_send(version: Version, transfer: Transfer) -> None:
    first = version.sends[0] if version.sends else transfer
    if version.origin is not Origin.COPY and first.step == transfer.step and first.level != transfer.level:
        raise ScheduleError(
            f"{transfer}: the same version is first sent at level {first.level} and at this one"
        )
    version.sends.append(transfer)


def _arrival(step: int, own: Version | None, arrivals: list[tuple[Transfer, Version]]) -> Version:
    """Return the version that the arrivals of one step make of the receiver's ``own`` version."""
    first = arrivals[0][0]
    sources = [version for _, version in arrivals]
    for (transfer, _), (other, _) in itertools.combinations(arrivals, 2):
        if transfer.src == other.src:
            raise ScheduleError(f"{transfer}: twice in one step")
        if "copy" in (transfer.op, other.op):
            raise ScheduleError(
                f"{transfer}: rank {other.src} sends it the same chunk in this step ({other.op})"
            )
    if first.op == "copy":
        origin = Origin.COPY
    elif own is None:
        raise ScheduleError(
            f"{first}: rank {first.dst} does not hold this chunk, so there is nothing to add to"
        )
    else:
        origin = Origin.SUM
        sources = sorted([*sources, own], key=lambda version: version.rank)
    contributors = repeated = 0
    for source in sources:
        repeated |= source.repeated | (contributors & source.contributors)
        contributors |= source.contributors
    return Version(
        rank=first.dst,
        chunk=first.chunk,
        step=step,
        origin=origin,
        sources=tuple(sources),
        contributors=contributors,
        repeated=repeated,
        copied_level=sources[0].level,
    )


_OPS = {sign: op for op, sign in OP_SIGNS.items()}
_HEAD = re.compile(r"(\w+) ranks=(\d+) chunks=(\d+)(?: root=(\d+))?")
_ROW = re.compile(r"rank\s+(\d+)\s*((?:\|[^|]*)*)")
_SEND = re.compile(r"c(\d+)([+=])(\d+(?:,\d+)*)(?:@(\d+))?")


def parse(text: str) -> Schedule:
    """Read a schedule from its text form; the inverse of ``str(schedule)``.

    Args:
        text: The text form, as the module docstring of `dtcomm.schedule.ir` describes it. Spaces need not align.

    Returns:
        The schedule. It is not verified yet; see `dtcomm.schedule.verify`.

    Raises:
        ScheduleError: If the text cannot be read. The message names the line or the cell.

    Example:
        >>> from dtcomm.schedule import parse
        >>> parse("all_reduce ranks=2 chunks=1\\nrank 0 | c0+1\\nrank 1 | c0+0").steps
        1
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    head = _HEAD.fullmatch(lines[0] if lines else "")
    if head is None:
        raise ScheduleError(
            f"line 1: expected 'collective ranks=N chunks=C [root=R]', got {lines[0] if lines else ''!r}"
        )
    collective, ranks, chunks, root = head[1], int(head[2]), int(head[3]), int(head[4] or 0)
    if len(lines) != ranks + 1:
        raise ScheduleError(f"expected a row for each of {ranks} ranks, got {len(lines) - 1} rows")
    transfers: list[Transfer] = []
    for rank, line in enumerate(lines[1:]):
        row = _ROW.fullmatch(line)
        if row is None or int(row[1]) != rank:
            raise ScheduleError(f"line {rank + 2}: expected 'rank {rank} | ...', got {line!r}")
        for step, cell in enumerate(row[2].split("|")[1:]):
            transfers += _parse_cell(rank, step, cell.split())
    return Schedule(collective=collective, ranks=ranks, chunks=chunks, root=root, transfers=tuple(transfers))


def _parse_cell(rank: int, step: int, sends: list[str]) -> list[Transfer]:
    if sends == ["."]:
        return []
    transfers = []
    for text in sends:
        send = _SEND.fullmatch(text)
        if send is None:
            raise ScheduleError(
                f"rank {rank} step {step}: expected a send like 'c0+1' or 'c0=1,2', or '.', got {text!r}"
            )
        chunk, op, level = int(send[1]), _OPS[send[2]], int(send[4] or 0)
        transfers += [Transfer(step, rank, int(peer), chunk, op, level) for peer in send[3].split(",")]
    return transfers
