"""The simulator: predicts how long a schedule's steps take on links and processors with given constants.

The model is deliberately small. Every rank has one full-duplex port per level. What a rank sends in a step shares the
port, and messages to several peers wait for the latency together. Steps do not overlap, and all ranks leave a step
together. The total is therefore that of ONE pass over the schedule: a tensor that is cut into pieces does better, since
the transfers of one piece overlap the arithmetic of its neighbours. The planner's cost model calls `simulate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dtcomm.schedule.ir import (
    Origin,
    Schedule,
    Transfer,
    Version,
    WireFormat,
    common_granularity,
    trace,
)


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """A link between two ranks.

    Args:
        latency: Seconds from the start of a message until its first byte arrives.
        bandwidth: Bytes per second in each direction at once.
        overhead: Seconds that each message occupies the port in addition to its bytes.

    Raises:
        ValueError: If a value is negative, or the bandwidth is not positive.
    """

    latency: float
    bandwidth: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if self.latency < 0 or self.overhead < 0 or self.bandwidth <= 0:
            raise ValueError(f"link: latency and overhead must be >= 0 and bandwidth > 0, got {self}")

    def seconds(self, nbytes: int, messages: int = 1) -> float:
        """Return the time of ``messages`` messages of ``nbytes`` bytes in all, one after the other through one port."""
        return self.latency + messages * self.overhead + nbytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class ComputeCost:
    """Seconds per element to ``encode`` it, and to ``decode`` it and add it or write it to the output."""

    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The times of the slowest rank within one step, in seconds, and the most bytes that one port moves in the step."""

    encode: float
    wire: float
    decode: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """The time of the step: encode, move and decode, one after the other."""
        return self.encode + self.wire + self.decode


@dataclass(frozen=True, kw_only=True)
class ScheduleTime:
    """The predicted times of a schedule, one entry per step."""

    steps: tuple[StepTime, ...]

    @property
    def seconds(self) -> float:
        """The time of one pass over the schedule."""
        return sum(step.seconds for step in self.steps)


def simulate(
    schedule: Schedule,
    numel: int,
    codec: WireFormat | Sequence[WireFormat],
    links: LinkCost | Sequence[LinkCost],
    compute: ComputeCost | None = None,
    dtype: Any = None,
    level_of: Callable[[Transfer], int] | None = None,
) -> ScheduleTime:
    """Predict the time of each step of a schedule.

    Args:
        schedule: The schedule.
        numel: Elements of the tensor, counted as in `Schedule.bytes_on_wire`.
        codec: One codec, or one for each level.
        links: One link, or one for each level.
        compute: Seconds per element of encoding and decoding; None means that they take no time.
        dtype: The dtype of the elements; None leaves it to the codec's default.
        level_of: Returns the level whose link a transfer takes; None means ``transfer.level``.

    Returns:
        The times by step; ``.seconds`` is their sum.

    Raises:
        ValueError: If the schedule uses a level that has no link.

    Example:
        >>> from dtcomm import algorithms, codec
        >>> from dtcomm.schedule import simulate
        >>> from dtcomm.schedule.simulate import LinkCost
        >>> ring = algorithms.build("ring", "all_reduce", 2)
        >>> link = LinkCost(latency=1e-6, bandwidth=1e9)
        >>> round(simulate(ring, 1_000_000, codec("none"), link).seconds * 1e3, 3)
        4.004
    """
    compute = ComputeCost() if compute is None else compute
    by_level = [links] if isinstance(links, LinkCost) else list(links)
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
            # A sum is encoded when it is computed, an input when it is first sent.
            step = version.sends[0].step if version.origin is Origin.INPUT else version.step
            encoded[step][version.rank] += elements
        decoded[version.step][version.rank] += elements * _terms_decoded(version, version in outputs)

    times = []
    for step in range(schedule.steps):
        used = [
            (by_level[level], port) for at, level in ports if at == step for port in ports[at, level].values()
        ]
        times.append(
            StepTime(
                encode=compute.encode * max(encoded[step].values(), default=0),
                wire=max((link.seconds(port.nbytes, port.messages) for link, port in used), default=0.0),
                decode=compute.decode * max(decoded[step].values(), default=0),
                nbytes=max((port.nbytes for _, port in used), default=0),
            )
        )
    return ScheduleTime(steps=tuple(times))


@dataclass
class _Port:
    """The traffic in one direction of one rank's port within one step."""

    nbytes: int = 0
    messages: int = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.messages += 1


def _terms_decoded(version: Version, is_output: bool) -> int:
    """Return how many terms are decoded: all terms of a sum, the own one included; a copy only if it is an output."""
    if version.origin is Origin.SUM:
        return len(version.sources)
    return int(version.origin is Origin.COPY and is_output)
