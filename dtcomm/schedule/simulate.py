"""The simulator: how long a schedule's steps take on links and processors with given constants.

The model is deliberately small. Every rank has one full-duplex port per level; what it sends in a step shares
the port, and messages to several peers wait for the latency together. Steps do not overlap, and all ranks
leave a step together. So the total is that of ONE pass over the schedule: a tensor that is cut into pieces
does better, since a piece's transfers overlap its neighbours' arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dtcomm.schedule.ir import Schedule, Transfer, WireFormat, common_granularity
from dtcomm.schedule.trace import Origin, Version, trace


@dataclass(frozen=True, kw_only=True)
class Link:
    """``latency`` in seconds, ``bandwidth`` in bytes a second each way at once; each message keeps the port
    busy for ``overhead`` seconds more than its bytes do.
    """

    latency: float
    bandwidth: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if self.latency < 0 or self.overhead < 0 or self.bandwidth <= 0:
            raise ValueError(f"link: latency and overhead must be >= 0 and bandwidth > 0, got {self}")

    def seconds(self, nbytes: int, messages: int = 1) -> float:
        """``messages`` messages of ``nbytes`` bytes in all, one after the other through one port."""
        return self.latency + messages * self.overhead + nbytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds an element: to ``encode`` one, and to ``decode`` one and add it or write it out."""

    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """The slowest rank's times within one step, in seconds, and the most bytes that one port moves in it."""

    encode: float
    wire: float
    decode: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """Encode, move, decode, one after the other."""
        return self.encode + self.wire + self.decode


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One entry a step."""

    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """The whole schedule, once."""
        return sum(step.seconds for step in self.steps)


def simulate(
    schedule: Schedule,
    numel: int,
    codec: WireFormat | Sequence[WireFormat],
    links: Link | Sequence[Link],
    work: Work | None = None,
    dtype: Any = None,
    level_of: Callable[[Transfer], int] | None = None,
) -> Timeline:
    """Times of each step for a tensor of ``numel`` elements (counted as in ``Schedule.bytes_on_wire``).

    ``codec`` and ``links`` may be one per level; ``level_of`` says which link a transfer takes (by default
    that of its own level).
    """
    work = Work() if work is None else work
    by_level = [links] if isinstance(links, Link) else list(links)
    level_of = level_of or (lambda transfer: transfer.level)
    granularity = common_granularity(codec)
    ports: dict[tuple[int, int], dict[tuple[int, str], _Port]] = defaultdict(lambda: defaultdict(_Port))
    encoded: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # step -> rank -> elements
    decoded: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    history = trace(schedule)
    outputs = set(history.outputs.values())
    for version in history.versions:
        elements = schedule.chunk_numel(version.chunk, numel, granularity)
        for transfer in version.sends:
            nbytes = schedule.payload_bytes(version.chunk, numel, codec, version.level, dtype)
            level = level_of(transfer)
            if level >= len(by_level):
                raise ValueError(f"links: the schedule uses level {level}, got {len(by_level)} link(s)")
            ports[transfer.step, level][transfer.src, "out"].add(nbytes)
            ports[transfer.step, level][transfer.dst, "in"].add(nbytes)
        if version.encoded:
            # A sum is encoded as it is made, an input when it is first sent.
            step = version.sends[0].step if version.origin is Origin.INPUT else version.step
            encoded[step][version.rank] += elements
        decoded[version.step][version.rank] += elements * _reads(version, version in outputs)

    steps = []
    for step in range(schedule.steps):
        used = [
            (by_level[level], port) for at, level in ports if at == step for port in ports[at, level].values()
        ]
        steps.append(
            Step(
                encode=work.encode * max(encoded[step].values(), default=0),
                wire=max((link.seconds(port.nbytes, port.messages) for link, port in used), default=0.0),
                decode=work.decode * max(decoded[step].values(), default=0),
                nbytes=max((port.nbytes for _, port in used), default=0),
            )
        )
    return Timeline(steps=tuple(steps))


@dataclass
class _Port:
    # One direction of one rank's port within one step.
    nbytes: int = 0
    messages: int = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.messages += 1


def _reads(version: Version, output: bool) -> int:
    # Terms of a sum, its own among them; a copy costs its decoding where it is an output.
    if version.origin is Origin.SUM:
        return len(version.sources)
    return int(version.origin is Origin.COPY and output)
