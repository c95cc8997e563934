"""``dtcomm plan --links``: unlike links between sites, the hierarchy that suits them, and the codec of each link."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dtcomm.extensions.jobs.sweep import MIN_SPEEDUP, size_name, time_name
from dtcomm.planner import LinkPlan, LinkRates, plan_links
from dtcomm.planner.cost_model import Table as CostTable
from dtcomm.planner.links import read_json

WIDTH = 120
_RATES = {"gbit": 1.0, "mbit": 1e-3}
_TIMES = {"us": 1.0, "ms": 1e3, "s": 1e6}
_LINK = re.compile(
    r"(?P<a>\d+)-(?P<b>\d+)=(?P<rate>\d+(?:\.\d+)?)(?P<unit>gbit|mbit)(?::(?P<time>\d+(?:\.\d+)?)(?P<of>us|ms|s))?"
)
USAGE = (
    "A-B=RATE[:ROUND_TRIP], of sites or hosts numbered from 0, such as "
    "0-1=1gbit:75ms,0-2=500mbit:40ms,1-2=1gbit:90ms"
)


@dataclass(frozen=True, kw_only=True)
class LinksOptions:
    """What to plan, checked.

    Args:
        rates: The links between ranks.
        codecs: The codecs that may be used.
        sizes: The bytes of a message.
        dtype: Of the message.
    """

    rates: LinkRates
    codecs: Sequence[str]
    sizes: Sequence[int]
    dtype: torch.dtype


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
        return next(name for spec, name, seconds in self.plan.seconds if self._is_chosen(spec, seconds))

    def _is_chosen(self, spec: str, seconds: float) -> bool:
        return spec == self.plan.codec and seconds == self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values, times in microseconds."""
        return {
            "size": self.nbytes,
            "algorithm": self.algorithm,
            "codec": self.plan.codec,
            "time_us": round(self.seconds * 1e6, 3),
            "speedup": round(self.plain / self.seconds, 3),
            "compared": [
                {"codec": spec, "algorithm": name, "time_us": round(seconds * 1e6, 3)}
                for spec, name, seconds in self.others
            ],
        }


def rates_of(text: str, per_host: int, inside: tuple[float, float]) -> LinkRates:
    """Return the links that a flag describes.

    Args:
        text: `USAGE`, or a file that `LinkRates.of` reads, of links between ranks.
        per_host: Ranks of a site; not used with a file.
        inside: (Gbit/s, microseconds) of the links between these; not used with a file.

    Raises:
        ValueError: It is neither.
    """
    path = Path(text)
    if path.is_file():
        return LinkRates.of(read_json(path))
    links: dict[tuple[int, int], tuple[float, float]] = {}
    for part in text.lower().replace(" ", "").split(","):
        match = _LINK.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a link, and {text!r} is no file; expected {USAGE}")
        pair = int(match["a"]), int(match["b"])
        if pair in links or pair[::-1] in links:
            raise ValueError(f"{match['a']}-{match['b']}: given twice")
        one_way = float(match["time"] or 0) * _TIMES[match["of"] or "us"] / 2
        links[pair] = float(match["rate"]) * _RATES[match["unit"]], one_way
    return LinkRates.between_sites(links, per_host, inside)


def plan_sizes(options: LinksOptions, table: CostTable) -> list[SizePlan]:
    """Return the best plan for each size: of the codecs that with the least predicted time."""
    found = []
    for nbytes in options.sizes:
        numel = max(1, nbytes // options.dtype.itemsize)
        plans = [plan_links(options.rates, codec, numel, options.dtype, table) for codec in options.codecs]
        compared = {(spec, name): seconds for plan in plans for spec, name, seconds in plan.seconds}
        chosen = [
            (min(seconds for spec, _, seconds in plan.seconds if spec == plan.codec), plan) for plan in plans
        ]
        seconds, best = min(chosen, key=lambda pair: pair[0])
        found.append(
            SizePlan(
                nbytes=nbytes,
                plan=best,
                seconds=seconds,
                plain=min(time for (spec, _), time in compared.items() if spec == "none"),
                others=tuple(
                    sorted(((*key, time) for key, time in compared.items()), key=lambda row: row[2])
                ),
            )
        )
    return found


def link_rows(rates: LinkRates, plan: LinkPlan) -> list[dict[str, Any]]:
    """Return each link between groups, and the links inside each group, with the codec that a plan has for them."""
    inside, _, between = plan.codec.partition("/")
    rows = []
    for index, group in enumerate(plan.groups):
        pairs = list(itertools.combinations(group, 2))
        if pairs:
            rows.append(_row(rates, f"inside group {index}", pairs, inside))
    for (i, first), (j, second) in itertools.combinations(enumerate(plan.groups), 2):
        rows.append(
            _row(rates, f"groups {i} and {j}", list(itertools.product(first, second)), between or inside)
        )
    return rows


def _row(rates: LinkRates, where: str, pairs: list[tuple[int, int]], codec: str) -> dict[str, Any]:
    worst = rates.worst_link(pairs)
    assert worst is not None
    return {
        "links": where,
        "ranks": sorted({rank for pair in pairs for rank in pair}),
        "gbit": min(rates.slowest(a, b) for a, b in pairs),
        "round_trip_ms": 2e3 * worst.latency,
        "codec": codec,
    }


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


def print_links(options: LinksOptions, plans: Sequence[SizePlan], console: Console | None = None) -> None:
    """Print the table of sizes, the table of links for the largest size, and the verdict."""
    console = console or Console()
    if console.width < WIDTH:
        console = Console(width=WIDTH, file=console.file)
    console.print(
        f"all_reduce of {str(options.dtype).removeprefix('torch.')} on {options.rates.ranks} ranks, "
        "links as given",
        highlight=False,
    )
    table = Table(title="by size", title_justify="left")
    for name in ("size", "algorithm", "codec", "time", "without a codec", "speed-up"):
        table.add_column(name, justify="left" if name in ("algorithm", "codec") else "right", no_wrap=True)
    for plan in plans:
        table.add_row(
            size_name(plan.nbytes),
            plan.algorithm,
            plan.plan.codec,
            time_name(plan.seconds),
            time_name(plan.plain),
            f"{plan.plain / plan.seconds:.2f}",
        )
    console.print(table)
    links = Table(title=f"links, at {size_name(plans[-1].nbytes)}", title_justify="left")
    for name in ("links", "ranks", "slowest", "round trip", "codec"):
        links.add_column(name, justify="right" if name in ("slowest", "round trip") else "left")
    for row in link_rows(options.rates, plans[-1].plan):
        links.add_row(
            row["links"],
            " ".join(map(str, row["ranks"])),
            f"{row['gbit']:.4g} Gbit/s",
            f"{row['round_trip_ms']:.4g} ms",
            row["codec"],
        )
    console.print(links)
    for text in (
        "assumed, not measured: ranks of a group share its link to another group; lost packets are not counted",
        "in a program: dtcomm.planner.plan_links(links, codec) on all ranks, or DTCOMM_LINKS=FILE with algorithm auto",
    ):
        console.print(text, style="dim", highlight=False, soft_wrap=True)
    console.print(f"verdict: {verdict(options.rates, plans)}", style="bold", highlight=False, soft_wrap=True)


def run(options: LinksOptions, table: CostTable, json_file: str | None) -> int:
    """Plan, print, and write what was asked for; return 0, or 2 if an argument is wrong."""
    try:
        plans = plan_sizes(options, table)
    except ValueError as error:
        print(f"dtcomm plan: {error}", file=sys.stderr)
        return 2
    if json_file is not None:
        content = {
            "version": 1,
            "ranks": options.rates.ranks,
            "groups": [list(group) for group in plans[-1].plan.groups],
            "results": [plan.as_dict() for plan in plans],
            "links": link_rows(options.rates, plans[-1].plan),
            "verdicts": [verdict(options.rates, plans)],
        }
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            Path(json_file).write_text(text)
    if json_file != "-":
        print_links(options, plans)
    return 0
