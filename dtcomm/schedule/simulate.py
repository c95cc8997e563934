"""The simulator: how long a schedule's steps take on links and processors with given constants.

The model is deliberately small. Every rank has one full-duplex port per level; what it sends in a step shares
the port, and messages to several peers pay the latency once. Steps do not overlap, and all ranks leave a step
together. So the total is that of ONE pass over the schedule: a tensor that is cut into pieces does better,
since a piece's transfers overlap its neighbours' arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtcomm.schedule.ir import Schedule, WireFormat
from dtcomm.schedule.meaning import Origin, Version, trace


@dataclass(frozen=True, kw_only=True)
class Link:
    """``latency`` in seconds a message, ``bandwidth`` in bytes a second, each way at once."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError(f"link: latency must be >= 0 and bandwidth > 0, got {self}")

    def seconds(self, nbytes: int) -> float:
        """One message of ``nbytes`` bytes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds an element: to ``encode`` one, and to ``decode`` one and add it or write it out."""

    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """The slowest rank's times within one step, in seconds, and the most bytes that a rank sends in it."""

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
) -> Timeline:
    """Times of each step for a tensor of ``numel`` elements (counted as in ``Schedule.bytes_on_wire``).

    ``codec`` and ``links`` may be one per level.
    """
    work = Work() if work is None else work
    by_level = [links] if isinstance(links, Link) else list(links)
    granularity = (codec[0] if isinstance(codec, Sequence) else codec).granularity
    outgoing: dict[tuple[int, int], dict[int, int]] = defaultdict(
        lambda: defaultdict(int)
    )  # (step, level) -> rank
    incoming: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    encoded: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # step -> rank -> elements
    decoded: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    history = trace(schedule)
    outputs = set(history.outputs.values())
    for version in history.versions:
        elements = schedule.chunk_numel(version.chunk, numel, granularity)
        for transfer in version.sends:
            nbytes = schedule.payload_bytes(version.chunk, numel, codec, version.level, dtype)
            outgoing[transfer.step, transfer.level][transfer.src] += nbytes
            incoming[transfer.step, transfer.level][transfer.dst] += nbytes
        if version.encoded:
            # A sum is encoded as it is made, an input when it is first sent.
            step = version.sends[0].step if version.origin is Origin.INPUT else version.step
            encoded[step][version.rank] += elements
        decoded[version.step][version.rank] += elements * _reads(version, version in outputs)

    steps = []
    for step in range(schedule.steps):
        wire, most = 0.0, 0
        for level in {level for at, level in outgoing if at == step}:
            if level >= len(by_level):
                raise ValueError(f"links: the schedule uses level {level}, got {len(by_level)} link(s)")
            sends, receives = outgoing[step, level].values(), incoming[step, level].values()
            wire = max(wire, by_level[level].seconds(max([*sends, *receives])))
            most = max([most, *sends])
        steps.append(
            Step(
                encode=work.encode * max(encoded[step].values(), default=0),
                wire=wire,
                decode=work.decode * max(decoded[step].values(), default=0),
                nbytes=most,
            )
        )
    return Timeline(steps=tuple(steps))


def _reads(version: Version, output: bool) -> int:
    # Terms of a sum, its own among them; a copy costs its decoding where it is an output.
    if version.origin is Origin.SUM:
        return len(version.sources)
    return int(version.origin is Origin.COPY and output)
