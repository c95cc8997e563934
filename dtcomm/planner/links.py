"""Groups of ranks that fast links join, where other links are slower.

`levels_of` reads the rate of the link between each pair of ranks, which ``dtcomm doctor`` measures. Schedules with
levels, and codecs for each level, are then those of the groups.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtcomm.planner.cost_model import Table, Topology
from dtcomm.schedule.simulate import LinkCost

SLOW = 2.0  # times: links with rates closer than this count as equal
GBIT = 1.25e8  # bytes per second


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """The link between each pair of ranks.

    Args:
        gbit: ``gbit[a][b]``: the rate from rank a to rank b in Gbit/s; the diagonal is ignored.
        latency_us: The same of one-way latencies in microseconds. Default None: 0.

    Raises:
        ValueError: A matrix is not square, a rate is not above 0, or a latency is below 0.

    Example:
        >>> from dtcomm.planner.links import LinkRates
        >>> LinkRates(gbit=((0, 10), (1, 0))).slowest(0, 1)
        1.0
    """

    gbit: Sequence[Sequence[float]]
    latency_us: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        for name, matrix in (("gbit", self.gbit), ("latency_us", self.latency_us)):
            if matrix is None:
                continue
            rows = tuple(tuple(map(float, row)) for row in matrix)
            object.__setattr__(self, name, rows)
            if not rows or any(len(row) != len(self.gbit) for row in rows) or len(rows) != len(self.gbit):
                raise ValueError(f"{name}: expected one row and one column for each rank, got {matrix!r}")
            for a, b in itertools.permutations(range(len(rows)), 2):
                if not (0 < rows[a][b] < math.inf if name == "gbit" else 0 <= rows[a][b] < math.inf):
                    least = "above 0, finite" if name == "gbit" else "of at least 0, finite"
                    raise ValueError(
                        f"{name}: from rank {a} to rank {b}: {rows[a][b]:g}; expected numbers {least}"
                    )

    @classmethod
    def from_doctor(cls, report: Mapping[str, Any]) -> LinkRates:
        """Return what ``dtcomm doctor --json`` has measured under torchrun.

        Of two hosts the doctor measures some pairs of ranks; the others get the least rate and the most latency of
        these.

        Args:
            report: Its parsed output.

        Raises:
            ValueError: It contains no links, or one of them could not be measured.
        """
        details = {check["name"]: check.get("details", {}) for check in report.get("checks", ())}
        links = details.get("links", {}).get("links", ())
        if not links:
            raise ValueError(
                "report: contains no links; run dtcomm doctor --json under torchrun, as the job's ranks"
            )
        hosts = details["ranks"]["hosts"]
        gbit, latency = _empty(len(hosts), math.inf), _empty(len(hosts), 0.0)
        between: dict[tuple[str, str], list[float]] = {}
        for link in links:
            a, b = link["ranks"]
            if not (0 <= a < len(hosts) > b >= 0):
                raise ValueError(f"report: a link between ranks {a} and {b} of {len(hosts)}")
            if link["error"]:
                raise ValueError(f"report: the link between ranks {a} and {b} failed: {link['error']}")
            for (source, target), rate in zip(((a, b), (b, a)), link["gbit"], strict=True):
                gbit[source][target], latency[source][target] = rate, link["latency_us"]
                worst = between.setdefault((hosts[source], hosts[target]), [math.inf, 0.0])
                worst[:] = min(worst[0], rate), max(worst[1], link["latency_us"])
        for a, b in itertools.permutations(range(len(hosts)), 2):
            if gbit[a][b] == math.inf:
                gbit[a][b], latency[a][b] = between[hosts[a], hosts[b]]
        return cls(gbit=gbit, latency_us=latency)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> LinkRates:
        """Return the rates that a parsed file holds: a report of the doctor, or the arguments of this class.

        Raises:
            ValueError: It is neither.

        Example:
            >>> from dtcomm.planner.links import LinkRates
            >>> LinkRates.of({"gbit": [[0, 10], [1, 0]]}).ranks
            2
        """
        try:
            if "checks" in content:
                return cls.from_doctor(content)
            unknown = sorted(set(content) - {"gbit", "latency_us"})
            if "gbit" not in content or unknown:
                raise ValueError(
                    f"links: expected a report of dtcomm doctor --json, or gbit and latency_us; got {sorted(content)}"
                )
            return cls(gbit=content["gbit"], latency_us=content.get("latency_us"))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"links: {type(error).__name__}: {error}: the file is damaged") from None

    def of_ranks(self, ranks: Sequence[int]) -> LinkRates:
        """Return the links between some of the ranks.

        Raises:
            ValueError: There is no such rank.
        """
        if any(rank >= self.ranks for rank in ranks):
            raise ValueError(f"links: of {self.ranks} ranks; there is no rank {max(ranks)}")

        def some(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
            return [[matrix[a][b] for b in ranks] for a in ranks]

        return LinkRates(
            gbit=some(self.gbit), latency_us=None if self.latency_us is None else some(self.latency_us)
        )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.gbit)

    def slowest(self, a: int, b: int) -> float:
        """Return the rate of the slower direction between two ranks, in Gbit/s."""
        return min(self.gbit[a][b], self.gbit[b][a])

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that fast links join, in the order of their first ranks.

        Where rates differ by a factor of two or more, the largest gap between them divides links into fast and slow
        ones. All links inside a group are fast.
        """
        rates = sorted({self.slowest(a, b) for a, b in _pairs(self.ranks)})
        gap, limit = max(((high / low, high) for low, high in itertools.pairwise(rates)), default=(1.0, 0.0))
        if gap < SLOW:
            return (tuple(range(self.ranks)),)
        groups: list[list[int]] = []
        for rank in range(self.ranks):
            for group in groups:
                if all(self.slowest(rank, other) >= limit for other in group):
                    group.append(rank)
                    break
            else:
                groups.append([rank])
        return tuple(map(tuple, groups))

    def worst_link(self, pairs: Sequence[tuple[int, int]]) -> LinkCost | None:
        """Return a link with the least rate and the most latency of those between some pairs; None for no pairs."""
        if not pairs:
            return None
        rate = min(self.slowest(a, b) for a, b in pairs)
        latency = self.latency_us
        longest = 0.0 if latency is None else max(max(latency[a][b], latency[b][a]) for a, b in pairs)
        return LinkCost(latency=longest * 1e-6, bandwidth=rate * GBIT)


@functools.lru_cache(maxsize=64)
def levels_of(
    text: str,
    table: Table,
    ranks: tuple[int, ...],
    hosts: tuple[tuple[int, ...], ...],
    job_ranks: int | None = None,
) -> tuple[tuple[tuple[int, ...], ...], Table]:
    """Return the groups of ranks that schedules are built for, and the table that ``auto`` decides by.

    These are the groups that fast links join, if there are several, and the table with the rates of these links,
    without measured times of other groups. ValueError if ``text`` cannot be read, or has no link of one of the ranks.

    Args:
        text: A file with the links of all ranks, as `LinkRates.of` reads it; empty: hosts are the groups.
        ranks: The global ranks of the group.
        hosts: The ranks of each host, by their positions in the group.
        job_ranks: The number of ranks of the job, of which the file has to be. Default None: any.

    Example:
        >>> from dtcomm.planner import Table, levels_of
        >>> levels_of("", Table(), (0, 1), ((0,), (1,)))[0]
        ((0,), (1,))
    """
    if not text or len(ranks) < 2:
        return hosts, table
    try:
        every = LinkRates.of(json.loads(text))
        if job_ranks not in (None, every.ranks):
            raise ValueError(f"links of {every.ranks} ranks; the job has {job_ranks}")
        links = every.of_ranks(ranks)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the file of DTCOMM_TOPOLOGY: {error}") from None
    found = links.groups()
    groups = found if len(found) > 1 else hosts
    topology = Topology.of([_group_of(rank, groups) for rank in range(links.ranks)])
    inside, between = _level_costs(links, topology)
    if links.latency_us is None:
        inside = replace(inside, latency=table.inside.latency)
        between = replace(between, latency=table.between.latency)
    return groups, replace(
        table,
        inside=inside if len(groups) < links.ranks else table.inside,
        between=replace(between, overhead=table.between.overhead) if len(groups) > 1 else table.between,
        measured=table.measured if groups == hosts else (),
        source=f"links of DTCOMM_TOPOLOGY, else {table.source}",
    )


def _level_costs(links: LinkRates, topology: Topology) -> tuple[LinkCost, LinkCost]:
    """Return the worst link inside groups, and a rank's share of the worst one between them, or one of them twice."""
    levels: tuple[list[tuple[int, int]], ...] = ([], [])
    for a, b in _pairs(links.ranks):
        levels[topology.host_of[a] != topology.host_of[b]].append((a, b))
    inside, between = map(links.worst_link, levels)
    if between is not None:  # all ranks of a group send at the same time
        between = replace(between, bandwidth=between.bandwidth / max(map(len, topology.groups)))
    first = inside or between
    assert first is not None
    return first, between or first


def _group_of(rank: int, groups: Sequence[Sequence[int]]) -> int:
    return next(index for index, group in enumerate(groups) if rank in group)


def _pairs(ranks: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(ranks), 2))


def _empty(ranks: int, value: float) -> list[list[float]]:
    return [[value] * ranks for _ in range(ranks)]
