"""The cost model: constants and measurements by which algorithms are chosen, and the predicted time of a schedule.

`Table` holds both. ``dtcomm tune`` writes one as JSON, rank 0 reads it when a group starts, and `parse` turns its text
into a `Table` on every rank. `predict` applies the simulator to a schedule with the table's constants.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from dtcomm.codecs.base import Codec
from dtcomm.env import TUNE_VERSION
from dtcomm.schedule.ir import Schedule, Transfer
from dtcomm.schedule.simulate import ComputeCost, LinkCost, simulate


@dataclass(frozen=True)
class Topology:
    """Which rank is on which host; hosts are numbered in the order of their first ranks."""

    host_of: tuple[int, ...]

    def __post_init__(self) -> None:
        seen = 0
        for rank, host in enumerate(self.host_of):
            if not 0 <= host <= seen:
                raise ValueError(f"host_of: rank {rank} is on host {host}, but only {seen} came before it")
            seen = max(seen, host + 1)
        if not self.host_of:
            raise ValueError("host_of: at least one rank is needed")

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Topology:
        """Return the topology of ranks whose hosts have these names (or other identifiers)."""
        numbers: dict[Hashable, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @classmethod
    def even(cls, ranks: int, hosts: int = 1) -> Topology:
        """Return ``ranks`` ranks on ``hosts`` hosts, in blocks of almost equal size."""
        if not 1 <= hosts <= ranks:
            raise ValueError(f"hosts: must be 1..{ranks} for {ranks} ranks, got {hosts}")
        return cls(tuple(rank * hosts // ranks for rank in range(ranks)))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.host_of)

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return max(self.host_of) + 1

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on each host."""
        return tuple(
            tuple(rank for rank, at in enumerate(self.host_of) if at == host) for host in range(self.hosts)
        )

    def level(self, transfer: Transfer) -> int:
        """Return the level that a transfer crosses: 0 inside a host, 1 between hosts."""
        return int(self.host_of[transfer.src] != self.host_of[transfer.dst])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured times of one algorithm with one codec on a group of a given size.

    Args:
        points: (uncompressed bytes, seconds), sizes ascending.
    """

    collective: str
    algorithm: str
    codec: str
    ranks: int
    hosts: int
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or any(seconds <= 0 for _, seconds in self.points):
            raise ValueError(f"points: expected ascending sizes and times over 0, got {self.points}")

    def seconds(self, nbytes: int) -> float:
        """Return the time of a message of ``nbytes`` bytes.

        Between two measured sizes it is the smaller of two interpolations: a linear one, which fits small messages, and
        one of logarithms, which fits messages that leave the caches. Below the smallest size it is that size's time;
        above the largest size it grows in proportion.
        """
        (low, first), (high, last) = self.points[0], self.points[-1]
        if nbytes <= low:
            return first
        if nbytes >= high:
            return last * nbytes / high
        for (left, a), (right, b) in zip(self.points, self.points[1:]):
            if nbytes <= right:
                fraction = math.log(nbytes / left) / math.log(right / left)
                logarithmic = math.exp((1 - fraction) * math.log(a) + fraction * math.log(b))
                return min(logarithmic, a + (b - a) * (nbytes - left) / (right - left))
        raise AssertionError("sizes ascend")


@dataclass(frozen=True, kw_only=True)
class Table:
    """The constants and measurements that ``auto`` decides by. All ranks of a group must use the same table.

    Args:
        one_shot_bytes: The most bytes that a rank may send in one shot (payload times peers) before two shots are
            taken. A higher value saves a synchronisation; a lower value saves arithmetic, which one shot repeats on
            every rank.
        inside: The link within a host: alpha is its ``latency``, 1/beta its ``bandwidth``.
        between: The link between hosts.
        compute: Gamma: the seconds per element of encoding and decoding.
        rates: (codec, cost) for codecs that differ from ``compute``.
        measured: Measured times, which take precedence over the constants.
        compress_from: (codec, ranks, hosts, bytes): from how many bytes on a sum of activations on GPUs was faster in
            the codec than NCCL's; infinity: at no size.
        source: Where the table comes from.
    """

    one_shot_bytes: int = 128 * 1024
    inside: LinkCost = field(default=LinkCost(latency=5e-7, bandwidth=1e10))
    between: LinkCost = field(default=LinkCost(latency=2e-5, bandwidth=1.25e9, overhead=2e-6))
    compute: ComputeCost = field(default=ComputeCost(encode=2.5e-10, decode=2.5e-10))
    rates: tuple[tuple[str, ComputeCost], ...] = ()
    measured: tuple[Measured, ...] = ()
    compress_from: tuple[tuple[str, int, int, float], ...] = ()
    source: str = "dtcomm's own constants"

    def __post_init__(self) -> None:
        if self.one_shot_bytes < 0:
            raise ValueError(f"one_shot_bytes: must be at least 0, got {self.one_shot_bytes}")

    def compute_cost(self, codec: Codec) -> ComputeCost:
        """Return the seconds per element of a codec."""
        return next((cost for spec, cost in self.rates if spec == str(codec)), self.compute)

    def measurements(self, collective: str, codec: Codec, ranks: int, hosts: int) -> dict[str, Measured]:
        """Return the measurements of groups of that many ranks and hosts, by algorithm."""
        wanted = (collective, str(codec), ranks, hosts)
        return {
            row.algorithm: row
            for row in self.measured
            if (row.collective, row.codec, row.ranks, row.hosts) == wanted
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the table for JSON; `parse` reads it back."""
        return {"version": TUNE_VERSION, **asdict(self)}


@functools.lru_cache(maxsize=16)
def parse(text: str) -> Table:
    """Read a table from the JSON text of `Table.as_dict`; an empty text is the default table.

    Raises:
        ValueError: If the text cannot be read. The message says what is wrong.

    Example:
        >>> from dtcomm import planner
        >>> planner.parse("").one_shot_bytes
        131072
    """
    if not text:
        return Table()
    try:
        content = json.loads(text)
        if content["version"] != TUNE_VERSION:
            raise ValueError(
                f"version {content['version']}, expected {TUNE_VERSION}: run `dtcomm tune` again"
            )
        values = {each.name: content[each.name] for each in fields(Table)}
        values |= {name: LinkCost(**values[name]) for name in ("inside", "between")}
        return Table(
            **values
            | {
                "compute": ComputeCost(**values["compute"]),
                "rates": tuple((spec, ComputeCost(**cost)) for spec, cost in values["rates"]),
                "measured": tuple(
                    Measured(**row | {"points": tuple(map(tuple, row["points"]))})
                    for row in values["measured"]
                ),
                "compress_from": tuple(map(tuple, values["compress_from"])),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"the table of `dtcomm tune` (DTCOMM_TUNE) cannot be read: {what}") from None


def measured_bytes(numel: int, dtype: torch.dtype, codec: Codec) -> int:
    """Return the bytes by which measurements are indexed: the tensor's, or those in fp32 if there is a codec."""
    return numel * (dtype.itemsize if codec.name == "none" else 4)


def predict(
    schedule: Schedule, numel: int, dtype: torch.dtype, codec: Codec, topology: Topology, table: Table
) -> float:
    """Predict the seconds of one pass over a schedule; ``numel`` counts as in `Schedule.bytes_on_wire`.

    For large tensors, whose pieces overlap, this is an upper bound: it serves to compare algorithms, not to promise
    times.

    Example:
        >>> import torch
        >>> from dtcomm import algorithms, codec, planner
        >>> ring = algorithms.build("ring", "all_reduce", 4)
        >>> seconds = planner.predict(
        ...     ring, 1 << 20, torch.float32, codec("none"), planner.Topology.even(4, hosts=2), planner.Table()
        ... )
        >>> seconds > 0
        True
    """
    if topology.ranks != schedule.ranks:
        raise ValueError(f"topology: has {topology.ranks} ranks, the schedule {schedule.ranks}")
    links = (table.inside, table.between)
    return simulate(schedule, numel, codec, links, table.compute_cost(codec), dtype, topology.level).seconds
