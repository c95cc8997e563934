"""``dtcomm plan collective --links``: links of different speed, the hierarchy for them, and each one's codec."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtcomm.cli import new_table, write_json
from dtcomm.extensions.jobs.command.options import LinksOptions
from dtcomm.extensions.jobs.command.report import Output
from dtcomm.extensions.jobs.sweep import MIN_SPEEDUP, size_name, time_name
from dtcomm.planner import LinkPlan, LinkRates, plan_links
from dtcomm.planner.cost_model import Table as CostTable


@dataclass(frozen=True, kw_only=True)
class SizePlan:
    """The best plan for a size, and what it was compared with."""

    nbytes: int
    plan: LinkPlan
    seconds: float
    plain: float  # the fastest without a codec
    others: tuple[tuple[str, str, float], ...]

    @property
    def algorithm(self) -> str:
        """The name of the algorithm."""
        chosen = self.plan.codec, self.seconds
        return next(name for spec, name, seconds in self.plan.seconds if (spec, seconds) == chosen)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values, times in microseconds."""
        return {
            **{"size": self.nbytes, "algorithm": self.algorithm, "codec": self.plan.codec},
            **{"time_us": round(self.seconds * 1e6, 3), "speedup": round(self.plain / self.seconds, 3)},
            "compared": [
                {"codec": spec, "algorithm": name, "time_us": round(seconds * 1e6, 3)}
                for spec, name, seconds in self.others
            ],
        }


def plan_sizes(options: LinksOptions, table: CostTable) -> list[SizePlan]:
    """Return the best plan for each size: of the codecs that with the least predicted time."""
    found = []
    for nbytes in options.sizes:
        numel = max(1, nbytes // options.dtype.itemsize)
        plans = [plan_links(options.rates, codec, numel, options.dtype, table) for codec in options.codecs]
        compared = {(spec, name): seconds for plan in plans for spec, name, seconds in plan.seconds}

        def fastest(plan: LinkPlan) -> float:
            return min(seconds for spec, _, seconds in plan.seconds if spec == plan.codec)

        best = min(plans, key=fastest)
        plain = min(time for (spec, _), time in compared.items() if spec == "none")
        others = tuple(sorted(((*key, time) for key, time in compared.items()), key=lambda row: row[2]))
        found.append(SizePlan(nbytes=nbytes, plan=best, seconds=fastest(best), plain=plain, others=others))
    return found


def link_rows(rates: LinkRates, plan: LinkPlan) -> list[dict[str, Any]]:
    """Return each link between groups, and the links inside each group, with the codec that a plan has for them."""
    inside, _, between = plan.codec.partition("/")
    rows = []
    for index, group in enumerate(plan.groups):
        if pairs := list(itertools.combinations(group, 2)):
            rows.append(_row(rates, f"inside group {index}", pairs, inside))
    for (i, first), (j, second) in itertools.combinations(enumerate(plan.groups), 2):
        pairs = list(itertools.product(first, second))
        rows.append(_row(rates, f"groups {i} and {j}", pairs, between or inside))
    return rows


def _row(rates: LinkRates, where: str, pairs: list[tuple[int, int]], codec: str) -> dict[str, Any]:
    worst = rates.worst_link(pairs)
    assert worst is not None
    return {
        "links": where, "ranks": sorted({rank for pair in pairs for rank in pair}),
        "gbit": min(rates.slowest(a, b) for a, b in pairs), "round_trip_ms": 2e3 * worst.latency, "codec": codec,
    }  # fmt: skip


def verdict(rates: LinkRates, plans: Sequence[SizePlan]) -> str:
    """Return what to use, in one sentence."""
    largest = plans[-1]
    groups = largest.plan.groups
    names = " ".join("(" + " ".join(map(str, group)) + ")" for group in groups)
    what = (
        f"{rates.ranks} ranks are one group: their links are alike"
        if len(groups) == 1
        else f"{len(groups)} groups of ranks: {names}"
    )
    gain = largest.plain / largest.seconds
    pays = (
        f"{largest.algorithm} with {largest.plan.codec} is {gain:.2f}x as fast as the best without a codec"
        if gain >= MIN_SPEEDUP
        else f"{largest.algorithm} with {largest.plan.codec}; a codec gains less than {MIN_SPEEDUP:g}x"
    )
    return f"{what}; at {size_name(largest.nbytes)}, {pays}"


def print_links(options: LinksOptions, plans: Sequence[SizePlan]) -> None:
    """Print the verdict, the table of sizes, and the table of links for the largest size."""
    out = Output()
    out.text(f"verdict: {verdict(options.rates, plans)}", "bold")
    dtype = str(options.dtype).removeprefix("torch.")
    out.text(f"all_reduce of {dtype} on {options.rates.ranks} ranks, links as given")
    table = new_table((">size", "algorithm", "codec", ">time", ">without a codec", ">speed-up"), "by size")
    for plan in plans:
        times = time_name(plan.seconds), time_name(plan.plain), f"{plan.plain / plan.seconds:.2f}"
        table.add_row(size_name(plan.nbytes), plan.algorithm, plan.plan.codec, *times)
    out.print(table)
    columns = ("links", "~ranks", ">slowest", ">round trip", "codec")
    table = new_table(columns, f"links, at {size_name(plans[-1].nbytes)}")
    for row in link_rows(options.rates, plans[-1].plan):
        rate, round_trip = f"{row['gbit']:.4g} Gbit/s", f"{row['round_trip_ms']:.4g} ms"
        table.add_row(row["links"], " ".join(map(str, row["ranks"])), rate, round_trip, row["codec"])
    out.print(table)
    out.assumed(("ranks of a group share its link to another group", "lost packets are not counted"))
    out.text(
        "in a program: dtcomm.planner.plan_links(links, codec) on all ranks, or DTCOMM_TOPOLOGY=FILE, algorithm auto",
        "dim",
    )


def plan(options: LinksOptions, table: CostTable, json_file: str | None) -> None:
    """Plan, print, and write what was asked for."""
    plans = plan_sizes(options, table)
    content = {
        "version": 1, "ranks": options.rates.ranks, "groups": [list(group) for group in plans[-1].plan.groups],
        "results": [plan.as_dict() for plan in plans], "links": link_rows(options.rates, plans[-1].plan),
        "verdicts": [verdict(options.rates, plans)],
    }  # fmt: skip
    if write_json(content, json_file):
        print_links(options, plans)
