"""The frame of the programs: options, contestants that take turns within a round, ratios of rounds, tables and JSON.

A program gives a function for each contestant, which returns the seconds of a call. The first contestant of a case is
the peer that the others are compared with.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bench.common import report

T = TypeVar("T")
#: Runs a contestant so many times and returns the seconds of one call.
Measure = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a call, or ratios, over several rounds: median, quartiles, extremes."""

    median: float
    low: float
    high: float
    best: float
    worst: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Timing:
        """Summarize ``values``, which must not be empty."""
        ordered = sorted(values)
        quartiles = (
            statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
        )
        return cls(
            median=statistics.median(ordered),
            low=quartiles[0],
            high=quartiles[2],
            best=ordered[0],
            worst=ordered[-1],
            rounds=len(ordered),
        )

    @classmethod
    def ratios(cls, peer: Sequence[float], own: Sequence[float]) -> Timing:
        """Summarize the ratios of the rounds: above 1, ``own`` is faster than ``peer``."""
        return cls.of([a / b for a, b in zip(peer, own, strict=True)])

    def as_dict(self) -> dict[str, object]:
        """Return microseconds: the median and the range."""
        return {
            "median_us": round(self.median * 1e6, 3),
            "range_us": [round(self.best * 1e6, 3), round(self.worst * 1e6, 3)],
            "rounds": self.rounds,
        }


def iterations(seconds: float, budget: float, most: int = 2000) -> int:
    """Return how many calls of about ``seconds`` each fit into ``budget`` seconds; at least one."""
    return max(1, min(most, int(budget / max(seconds, 1e-9))))


def in_turn(contestants: Sequence[T], number: int) -> list[T]:
    """Return the contestants in the order of a round: a random one, the same in every run.

    In one fixed order, what recurs at regular times, such as a timer of TCP, may always meet the same contestant.

    Example:
        >>> sorted(in_turn(["a", "b", "c"], 7))
        ['a', 'b', 'c']
    """
    return random.Random(number).sample(list(contestants), len(contestants))


def take_turns(
    contestants: Mapping[str, Measure], rounds: int, seconds: float = 0.05
) -> dict[str, list[float]]:
    """Return the seconds of a call by contestant and round; a measurement takes about ``seconds``."""
    calls = {name: iterations(measure(1), seconds) for name, measure in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in in_turn(list(contestants), number):
            times[name].append(contestants[name](calls[name]))
    return times


class Results:
    """The rows of a program; prints the machine and the commit first.

    Attributes:
        rows: For JSON.
        failed: Sentences about wrong results; the exit status is 1 if there are any.
        facts: Further entries of the file, such as what a limit of time cut off.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.facts: dict[str, Any] = {}
        self._options = options
        print(report.headline())

    def add(
        self,
        title: str,
        case: Mapping[str, object],
        times: Mapping[str, Sequence[float]],
        extra: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Add and print the rows of a case.

        Args:
            title: Title of the table.
            case: Fields of each row.
            times: What `take_turns` returned; the first contestant is the peer.
            extra: Further fields by contestant, which the table shows as well.
        """
        peer = next(iter(times))
        lines = []
        columns = list(dict.fromkeys(field for fields in (extra or {}).values() for field in fields))
        for name, series in times.items():
            timing, ratio = Timing.of(series), Timing.ratios(times[peer], series)
            fields = (extra or {}).get(name, {})
            row = {**case, "name": name, **timing.as_dict(), "against": peer}
            row |= {
                "ratio": round(ratio.median, 3),
                "ratio_range": [round(ratio.best, 3), round(ratio.worst, 3)],
            }
            self.rows.append({**row, **fields})
            lines.append(
                [
                    name,
                    report.microseconds(timing.median),
                    f"{report.microseconds(timing.best)} to {report.microseconds(timing.worst)}",
                    f"{ratio.median:.2f}x ({ratio.best:.2f} to {ratio.worst:.2f})",
                    *(str(fields.get(column, "")) for column in columns),
                ]
            )
        report.table(title, ["", "median us", "range", f"as fast as {peer}", *columns], lines)
        self.write()

    def write(self) -> None:
        """Write the file, if one was asked for; programs that are cut off keep what they have."""
        if self._options.json:
            report.write(self._options.json, {**self.facts, "rows": self.rows, "failed": self.failed})

    def finish(self) -> int:
        """Write the file, print what failed, and return the exit status."""
        self.write()
        for sentence in self.failed:
            print(f"WRONG: {sentence}", file=sys.stderr)
        return 1 if self.failed else 0


def parser(description: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that all programs have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--repeat",
        type=int,
        default=rounds,
        metavar="N",
        help=f"rounds; default {rounds}, printed with their range",
    )
    made.add_argument("--quick", action="store_true", help="small sizes and two rounds, to see that it works")
    made.add_argument("--json", metavar="FILE", help="write the rows there")
    return made


def parse(made: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parse the arguments; a quick run has two rounds."""
    options = made.parse_args(arguments)
    if options.repeat < 1:
        made.error(f"--repeat: must be at least 1, got {options.repeat}")
    if options.quick:
        options.repeat = min(options.repeat, 2)
    return options
