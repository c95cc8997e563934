"""What a collective is expected to cost, read off its schedule, or off what `dtcomm tune` measured."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtcomm.codecs.base import Codec
from dtcomm.planner.hardware import Topology
from dtcomm.schedule.ir import Schedule
from dtcomm.schedule.simulate import ComputeCost, Link, simulate

VERSION = 1
NEAR, FAR = "near", "far"
PLACEMENTS = ("", NEAR, FAR)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of one algorithm with one codec on a group like this, as (uncompressed bytes, seconds) by size.

    ``placement``: whether the CPUs of a host's ranks shared a cache then (``near``) or not (``far``); empty where
    nobody knows, or it does not matter.
    """

    collective: str
    algorithm: str
    codec: str
    ranks: int
    hosts: int
    points: tuple[tuple[int, float], ...]
    placement: str = ""

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"placement: {self.placement!r} is not one of {', '.join(map(repr, PLACEMENTS))}"
            )
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or any(seconds <= 0 for _, seconds in self.points):
            raise ValueError(f"points: expected rising sizes and times over 0, got {self.points}")

    def seconds(self, nbytes: int) -> float:
        """Between two sizes the less of two lines: a constant and so much a byte, which small messages keep to, and
        one of logarithms, which those keep to that leave the caches. Below the least size as long as that, above the
        largest in proportion.
        """
        (low, first), (high, last) = self.points[0], self.points[-1]
        if nbytes <= low:
            return first
        if nbytes >= high:
            return last * nbytes / high
        for (left, a), (right, b) in zip(self.points, self.points[1:]):
            if nbytes <= right:
                share = math.log(nbytes / left) / math.log(right / left)
                curved = math.exp((1 - share) * math.log(a) + share * math.log(b))
                return min(curved, a + (b - a) * (nbytes - left) / (right - left))
        raise AssertionError("sizes rise")


@dataclass(frozen=True, kw_only=True)
class Table:
    """The constants that ``auto`` decides by. All ranks of a group must use the same.

    ``one_shot_bytes``: the most bytes that a rank may send in one shot (payload times peers) before two shots
    are taken; higher saves a synchronisation, lower saves arithmetic, which one shot repeats on every rank.
    ``inside`` and ``between`` are the links within a host and between hosts: alpha is ``latency``, 1/beta
    ``bandwidth``. ``work`` is gamma: encoding and decoding, in seconds an element; ``rates`` the same by codec.
    ``measured`` goes before all of these; ``source`` says where the table is from.
    """

    one_shot_bytes: int = 128 * 1024
    inside: Link = field(default=Link(latency=5e-7, bandwidth=1e10))
    between: Link = field(default=Link(latency=2e-5, bandwidth=1.25e9, overhead=2e-6))
    work: ComputeCost = field(default=ComputeCost(encode=2.5e-10, decode=2.5e-10))
    rates: tuple[tuple[str, ComputeCost], ...] = ()
    measured: tuple[Measured, ...] = ()
    source: str = "dtcomm's own constants"

    def __post_init__(self) -> None:
        if self.one_shot_bytes < 0:
            raise ValueError(f"one_shot_bytes: must be at least 0, got {self.one_shot_bytes}")

    def work_of(self, codec: Codec) -> ComputeCost:
        """Of one codec."""
        return next((work for spec, work in self.rates if spec == str(codec)), self.work)

    def measurements(
        self, collective: str, codec: Codec, ranks: int, hosts: int, placement: str = ""
    ) -> dict[str, Measured]:
        """By algorithm, what was measured on a group of that many ranks and hosts, placed like that.

        Where nothing was, or ``placement`` is empty: what is to be expected over all placements that were seen.
        """
        wanted = (collective, str(codec), ranks, hosts)
        found: dict[str, list[Measured]] = {}
        for each in self.measured:
            if (each.collective, each.codec, each.ranks, each.hosts) == wanted:
                found.setdefault(each.algorithm, []).append(each)
        return {
            name: next((row for row in rows if placement and row.placement == placement), None) or _mean(rows)
            for name, rows in found.items()
        }

    def placements(self, collective: str, codec: Codec, ranks: int, hosts: int) -> tuple[str, ...]:
        """Those that such a group was measured in."""
        wanted = (collective, str(codec), ranks, hosts)
        seen = {
            each.placement
            for each in self.measured
            if (each.collective, each.codec, each.ranks, each.hosts) == wanted
        }
        return tuple(each for each in PLACEMENTS if each in seen)

    def as_dict(self) -> dict[str, Any]:
        """Times in microseconds, bandwidths in GB/s; ``parse`` reads it back."""
        return {
            "version": VERSION,
            "source": self.source,
            "one_shot_bytes": self.one_shot_bytes,
            "links": {"inside": _link(self.inside), "between": _link(self.between)},
            "work": _work(self.work),
            "rates": {spec: _work(work) for spec, work in self.rates},
            "measured": [
                {
                    "collective": each.collective,
                    "algorithm": each.algorithm,
                    "codec": each.codec,
                    "ranks": each.ranks,
                    "hosts": each.hosts,
                    "placement": each.placement,
                    "points_us": [[size, round(seconds * 1e6, 3)] for size, seconds in each.points],
                }
                for each in self.measured
            ],
        }


def _link(link: Link) -> dict[str, float]:
    return {
        "latency_us": link.latency * 1e6,
        "gbytes": link.bandwidth / 1e9,
        "message_us": link.overhead * 1e6,
    }


def _work(work: ComputeCost) -> list[float]:
    # GB/s of fp32: what goes in, what comes out.
    return [4e-9 / work.encode if work.encode else 0.0, 4e-9 / work.decode if work.decode else 0.0]


@functools.lru_cache(maxsize=16)
def parse(text: str) -> Table:
    """The table that ``as_dict`` makes, as JSON; an empty text is the default. ValueError says what is wrong."""
    if not text:
        return Table()
    try:
        found = json.loads(text)
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}, expected {VERSION}: run `dtcomm tune` again")
        return Table(
            one_shot_bytes=int(found["one_shot_bytes"]),
            inside=_to_link(found["links"]["inside"]),
            between=_to_link(found["links"]["between"]),
            work=_to_work(found["work"]),
            rates=tuple((spec, _to_work(pair)) for spec, pair in found["rates"].items()),
            measured=tuple(_to_measured(each) for each in found["measured"]),
            source=str(found["source"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"the table of `dtcomm tune` (DTCOMM_TUNE) cannot be read: {what}") from None


def _to_link(found: Mapping[str, float]) -> Link:
    return Link(
        latency=found["latency_us"] * 1e-6,
        bandwidth=found["gbytes"] * 1e9,
        overhead=found["message_us"] * 1e-6,
    )


def _to_work(pair: Sequence[float]) -> ComputeCost:
    encode, decode = pair
    return ComputeCost(encode=4e-9 / encode if encode else 0.0, decode=4e-9 / decode if decode else 0.0)


def _to_measured(found: Mapping[str, Any]) -> Measured:
    return Measured(
        collective=found["collective"],
        algorithm=found["algorithm"],
        codec=found["codec"],
        ranks=int(found["ranks"]),
        hosts=int(found["hosts"]),
        points=tuple((int(size), us * 1e-6) for size, us in found["points_us"]),
        placement=str(found.get("placement", "")),
    )


def _mean(rows: Sequence[Measured]) -> Measured:
    """The geometric mean, at the sizes that all of ``rows`` have."""
    if len(rows) == 1:
        return rows[0]
    times = [dict(row.points) for row in rows]
    shared = [size for size in times[0] if all(size in others for others in times)] or list(times[0])
    points = tuple(
        (size, math.exp(statistics.fmean(math.log(found[size]) for found in times if size in found)))
        for size in shared
    )
    return replace(rows[0], points=points, placement="")


def measured_bytes(numel: int, dtype: torch.dtype, codec: Codec) -> int:
    """What measurements count: the tensor's bytes, or those of fp32 where a codec does the work."""
    return numel * (dtype.itemsize if codec.name == "none" else 4)


def predict(
    schedule: Schedule, numel: int, dtype: torch.dtype, codec: Codec, topology: Topology, table: Table
) -> float:
    """Seconds of one pass over ``schedule``; ``numel`` counts the whole tensor (``Schedule.bytes_on_wire``).

    An upper bound for large tensors, whose pieces overlap: it serves to compare algorithms, not to promise
    times.
    """
    if topology.ranks != schedule.ranks:
        raise ValueError(f"topology: has {topology.ranks} ranks, the schedule {schedule.ranks}")
    links = (table.inside, table.between)
    return simulate(schedule, numel, codec, links, table.work_of(codec), dtype, topology.level).seconds
