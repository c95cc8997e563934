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


LIBRARY_SIZES = (KB, 64 * KB, MB, 16 * MB, 64 * MB)
# (against, {bytes: how many times faster}) per rank count
FASTER: dict[int, list[tuple[str, dict[int, float]]]] = {
    2: [
        ("gloo", {KB: 40, 64 * KB: 20, MB: 8, 16 * MB: 5, 64 * MB: 5, 256 * MB: 5}),
        ("mpi", {64 * KB: 1, MB: 1.5, 16 * MB: 1.5, 64 * MB: 1.5, 256 * MB: 1.5}),
        *((peer, dict.fromkeys(LIBRARY_SIZES, 1.0)) for peer in ("deepspeed", "oneccl")),
    ],
    4: [
        ("gloo", {KB: 100, MB: 20, 64 * MB: 4}),
        ("mpi", {MB: 1.5, 16 * MB: 1.5, 64 * MB: 1.5}),
        *((peer, dict.fromkeys(LIBRARY_SIZES, 1.0)) for peer in ("deepspeed", "oneccl")),
    ],
}
MOST_US = {KB: 1.5, 64 * KB: 12.0}  # of a call from Python, 2 ranks
NEAR_YARDSTICK = 1 / 1.1  # of its speed, in its fastest setting


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
    for size, most_us in MOST_US.items():
        name = f"a call from Python under {most_us:g} µs"
        targets.append(Target(name=name, bytes=size, ranks=2, most_us=most_us))
    for size in (64 * MB, 256 * MB):
        targets.append(
            Target(
                name="dtcomm.empty: 90% of the floor",
                bytes=size,
                ranks=2,
                ours="dtcomm.empty",
                against="floor",
                least=0.9,
                percent=True,
            )
        )
    for size in (MB, 16 * MB, 64 * MB, 256 * MB):
        targets.append(
            Target(
                name="within 10% of the yardstick",
                bytes=size,
                ranks=2,
                against="yardstick",
                least=NEAR_YARDSTICK,
                percent=True,
            )
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
