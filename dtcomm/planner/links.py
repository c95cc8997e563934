"""Groups of ranks that fast links join, and a codec for each level: on links that are slower than others.

`plan_links` reads the rate of the link between each pair of ranks, which ``dtcomm doctor`` measures, and returns the
schedule and the codecs of an all_reduce. It is a pure function of what it is given, so ranks that pass the same rates
need not communicate.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dtcomm import algorithms
from dtcomm.codecs.base import Codec
from dtcomm.codecs.spec import codec as parse_codec
from dtcomm.planner.cost_model import Table, Topology
from dtcomm.planner.select_algorithm import (
    DEFAULT,
    FIXED_OVERHEAD,
    MIN_HIERARCHY_GAIN,
    SHARED_MEMORY_BANDWIDTH,
)
from dtcomm.schedule.ir import Schedule
from dtcomm.schedule.simulate import LinkCost, simulate

SLOW = 2.0  # times: links with rates closer than this count as equal
GBIT = 1.25e8  # bytes per second
NONE = parse_codec("none")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; ValueError names the file if it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """The link between each pair of ranks.

    Args:
        gbit: ``gbit[a][b]``: the rate from rank a to rank b in Gbit/s; the diagonal is ignored.
        latency_us: The same of one-way latencies in microseconds. Default None: 0.

    Raises:
        ValueError: A matrix is not square, a rate is not above 0, or a latency is below 0.

    Example:
        >>> from dtcomm.planner import LinkRates
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
    def from_doctor(cls, report: str | Path | Mapping[str, Any]) -> LinkRates:
        """Return what ``dtcomm doctor --json`` has measured under torchrun.

        Of two hosts the doctor measures some pairs of ranks; the others get the least rate and the most latency of
        these.

        Args:
            report: The file with its output, or the parsed output.

        Raises:
            ValueError: It contains no links, or one of them could not be measured.
        """
        content: Mapping[str, Any] = report if isinstance(report, Mapping) else read_json(Path(report))
        details = {check["name"]: check.get("details", {}) for check in content.get("checks", ())}
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
            >>> from dtcomm.planner import LinkRates
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


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """What to pass to an all_reduce, or to an integration, over uneven links.

    Attributes:
        codec: The codec, ``A/B`` if the links between groups have another one than those inside groups.
        algorithm: The name of an algorithm, or the schedule of the hierarchy of the groups.
        groups: The ranks that fast links join.
        reason: Why this was chosen.
        seconds: (codec, algorithm, predicted seconds) of all that was compared.
    """

    codec: str
    algorithm: str | Schedule
    groups: tuple[tuple[int, ...], ...]
    reason: str
    seconds: tuple[tuple[str, str, float], ...]

    def __str__(self) -> str:
        return self.reason


def plan_links(
    links: LinkRates,
    codec: str | Codec = "int8",
    numel: int = 6_553_600,
    dtype: torch.dtype = torch.float32,
    table: Table = DEFAULT,
) -> LinkPlan:
    """Choose algorithm and codecs of an all_reduce whose links are unlike: the codec on slow links alone, if it pays.

    Whatever loses more bits has to be predicted 1.25 times faster. Ranks of a group share its link to other groups.
    Inside groups whose links are as fast as shared memory nothing is encoded.

    Args:
        links: The rates.
        codec: The codec that may be used. Default "int8".
        numel: The elements of a message. Default: 25 MiB of fp32, a bucket of DDP.
        dtype: Their dtype.
        table: The seconds for each element to encode and decode, as `dtcomm tune` has measured them; its links are not
            used. Default: dtcomm's own constants.

    Returns:
        The plan. Pass its ``codec`` and its ``algorithm`` to `dtcomm.all_reduce`, `dtcomm.ddp.compress` or
        `dtcomm.local_sgd.LocalSGD` on all ranks.

    Raises:
        ValueError: ``codec`` is not valid, or needs an agreement of the ranks, which hierarchies do not have; or there
            is one rank.

    Example:
        >>> from dtcomm.planner import LinkRates, plan_links
        >>> fast, slow = 100, 1  # two sites with two ranks each
        >>> rates = [[fast, fast, slow, slow]] * 2 + [[slow, slow, fast, fast]] * 2
        >>> plan = plan_links(LinkRates(gbit=rates), "int8")
        >>> plan.codec, plan.groups
        ('none/int8', ((0, 1), (2, 3)))
    """
    given: object = links
    if not isinstance(given, LinkRates):
        what = "LinkRates.from_doctor reads a file"
        raise TypeError(f"links: expected a dtcomm.planner.LinkRates, got {type(given).__name__}; {what}")
    lossy = parse_codec(codec)
    if lossy.needs_agreement:
        raise ValueError(f"codec: {lossy}: uses one representation on all levels of a hierarchy")
    if links.ranks < 2:
        raise ValueError("links: one rank has no links")
    groups = links.groups()
    topology = Topology.of([_group_of(rank, groups) for rank in range(links.ranks)])
    inside, between = _level_costs(links, topology)
    is_memory = inside.bandwidth >= SHARED_MEMORY_BANDWIDTH
    candidates = []
    for name, levels in _candidates(lossy, len(groups), is_memory):
        schedule = algorithms.build(name, "all_reduce", links.ranks, hosts=groups)
        cost = table.compute_cost(levels[-1])
        time = simulate(schedule, numel, levels, (inside, between), cost, dtype, topology.level)
        overhead = FIXED_OVERHEAD[len(groups) > 1] * sum(level != NONE for level in levels)
        candidates.append((_spec(levels), name, time.seconds + overhead))
    best = candidates[0]
    for candidate in candidates[1:]:
        if candidate[2] * MIN_HIERARCHY_GAIN <= best[2]:
            best = candidate
    spec, name, seconds = best
    schedule = algorithms.build(name, "all_reduce", links.ranks, hosts=groups)
    return LinkPlan(
        codec=spec,
        algorithm="direct" if len(groups) == 1 else schedule,
        groups=groups,
        reason=(
            f"{_describe(groups, inside, between)}: {name} with {spec} {seconds * 1e3:.3g} ms, with none "
            f"{min(time for other, _, time in candidates if other == 'none') * 1e3:.3g} ms (predicted)"
        ),
        seconds=tuple(sorted(candidates, key=lambda candidate: candidate[2])),
    )


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


def _candidates(lossy: Codec, groups: int, is_memory: bool) -> list[tuple[str, tuple[Codec, ...]]]:
    """Return algorithms with the codecs of their levels; those that lose more come later."""
    if groups == 1:
        return [("two_shot", (level,)) for level in ((NONE,) if is_memory else (NONE, lossy))]
    found: list[tuple[str, tuple[Codec, ...]]] = [
        ("two_shot", (NONE,)),
        ("hierarchical", (NONE, NONE)),
        ("hierarchical", (NONE, lossy)),
        ("two_shot", (lossy,)),
    ]
    return found if is_memory else [*found, ("hierarchical", (lossy, lossy))]


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


def _describe(groups: Sequence[Sequence[int]], inside: LinkCost, between: LinkCost) -> str:
    rates = [f"{cost.bandwidth / GBIT:.3g} Gbit/s" for cost in (inside, between)]
    if len(groups) == 1:
        return f"links of equal rates, {rates[0]}"
    return f"{len(groups)} groups of ranks, {rates[0]} inside and {rates[1]} for each rank between them"


def _spec(levels: Sequence[Codec]) -> str:
    return "/".join(dict.fromkeys(map(str, levels)))


def _group_of(rank: int, groups: Sequence[Sequence[int]]) -> int:
    return next(index for index, group in enumerate(groups) if rank in group)


def _pairs(ranks: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(ranks), 2))


def _empty(ranks: int, value: float) -> list[list[float]]:
    return [[value] * ranks for _ in range(ranks)]
