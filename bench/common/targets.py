"""Targets of bench.all_reduce as data, and the verdicts on a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.common.stats import Timing

KB, MB = 1 << 10, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target: the median of ``against`` is at least ``least`` times ours; without it, ours is under ``most_us``."""

    name: str
    bytes: int
    ranks: int
    ours: str = "dtcomm"
    against: str | None = None
    least: float = 0.0
    most_us: float = 0.0
    percent: bool = False


# (against, {bytes: how many times faster}) per rank count
FASTER: dict[int, list[tuple[str, dict[int, float]]]] = {
    2: [
        ("gloo", {KB: 40, 64 * KB: 20, MB: 8, 16 * MB: 5, 64 * MB: 5, 256 * MB: 5}),
        ("mpi", {MB: 1.5, 16 * MB: 1.5, 64 * MB: 3, 256 * MB: 3}),
    ],
    4: [("gloo", {KB: 100, MB: 20, 64 * MB: 4}), ("mpi", {64 * MB: 3})],
}


def all_reduce_targets(ranks: int) -> list[Target]:
    """Return the targets for ``ranks`` ranks."""
    targets = [
        Target(
            name=f"{least:g}x faster than {against}", bytes=size, ranks=ranks, against=against, least=least
        )
        for against, sizes in FASTER.get(ranks, [])
        for size, least in sizes.items()
    ]
    if ranks != 2:
        return targets
    targets.append(Target(name="a call from Python under 8 µs", bytes=KB, ranks=2, most_us=8))
    for size in (64 * MB, 256 * MB):
        for ours, least in (("dtcomm", 0.65), ("dtcomm.empty", 0.9)):
            name = f"{ours}: {least:.0%} of the floor"
            targets.append(
                Target(name=name, bytes=size, ranks=2, ours=ours, against="floor", least=least, percent=True)
            )
    for size in (16 * MB, 64 * MB):
        name = "within 5% of the yardstick"
        targets.append(
            Target(name=name, bytes=size, ranks=2, against="yardstick", least=1 / 1.05, percent=True)
        )
    return targets


def judge(targets: list[Target], best: Mapping[int, Mapping[str, Timing]]) -> list[dict[str, Any]]:
    """Return PASS or MISS for every target whose two sides were measured."""
    verdicts = []
    for target in targets:
        timings = best.get(target.bytes, {})
        if target.ours not in timings or (target.against is not None and target.against not in timings):
            continue
        ours = timings[target.ours].median
        if target.against is None:
            figure, met, shown = ours * 1e6, ours * 1e6 < target.most_us, f"{ours * 1e6:.2f} µs"
        else:
            figure = timings[target.against].median / ours
            met, shown = figure >= target.least, f"{figure:.0%}" if target.percent else f"{figure:.2f}x"
        verdicts.append(
            {
                "name": target.name,
                "bytes": target.bytes,
                "ranks": target.ranks,
                "figure": round(figure, 4),
                "shown": shown,
                "verdict": "PASS" if met else "MISS",
            }
        )
    return verdicts
