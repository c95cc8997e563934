"""Compare the speed of this checkout with that of another built checkout, case by case, in one run.

python -m bench.compare_checkouts OTHER [--rounds 20] [--cases CASE ...] [--ranks 2] [--json FILE]

The ranks of both checkouts stay alive and take turns within every round, so that a change of the machine's speed
affects both. They are started several times (--starts), because a time also depends on which memory pages a process
gets. A ratio is this checkout's time divided by the other's in the same round: above 1 this checkout is slower.

A case is one of

  all_reduce:SIZE:CODEC           an average of SIZE bytes of fp32, in place
  hook:BUCKETS:SIZE:CODEC         a step of DDP with the hook, with BUCKETS buckets of SIZE bytes
  encode:SIZE:CODEC               encode SIZE bytes of fp32, on one rank; also decode and reduce_encode

such as hook:8:256K:int8. Without --cases several sizes of each kind are measured, and every codec; a kind alone, such
as encode, stands for its default cases. A case that one of the checkouts does not have is reported and left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import report
from bench.common.harness import Timing, iterations
from bench.common.pool import RankFailed, collect
from dtcomm import codecs

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[1]
RANK_SCRIPT = ROOT / "bench" / "common" / "checkout_rank.py"
VERBS = ("encode", "decode", "reduce_encode")
KINDS = ("all_reduce", "hook", *VERBS)
SIDES = ("other", "this")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """One measured operation; ``str()`` is the inverse of `parse`."""

    kind: str
    nbytes: int
    codec: str
    buckets: int = 1

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case that ``text`` describes.

        Raises:
            ValueError: The kind is unknown, or the text does not have its form.
        """
        kind, _, arguments = text.partition(":")
        if kind not in KINDS:
            raise ValueError(f"case {text!r}: the kind {kind!r} is none of {', '.join(KINDS)}")
        form = "hook:BUCKETS:SIZE:CODEC" if kind == "hook" else f"{kind}:SIZE:CODEC"
        numbers, fields = form.count(":") - 1, arguments.split(":", form.count(":") - 1)
        try:
            *counts, size = fields[:numbers]
            case = cls(kind, report.parse_size(size), fields[numbers], *map(int, counts))
        except (ValueError, IndexError):
            raise ValueError(
                f"case {text!r}: expected {form}, such as {kind}:{'8:' * (kind == 'hook')}1M:int8"
            ) from None
        if case.nbytes < 4 or case.buckets < 1 or not case.codec:
            raise ValueError(
                f"case {text!r}: SIZE must be at least 4 bytes, BUCKETS at least 1, CODEC not empty"
            )
        return case

    def __str__(self) -> str:
        size = next(
            (
                f"{self.nbytes // scale}{unit}"
                for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))
                if self.nbytes % scale == 0
            ),
            str(self.nbytes),
        )
        buckets = f"{self.buckets}:" if self.kind == "hook" else ""
        return f"{self.kind}:{buckets}{size}:{self.codec}"

    @property
    def collective(self) -> bool:
        """Whether all ranks take part."""
        return self.kind not in VERBS


def default_cases() -> list[Case]:
    """Return all_reduce and the DDP hook at several sizes and codecs, and every codec's verbs at 1 MB."""
    texts = [
        f"all_reduce:{size}:{codec}" for size in ("1K", "64K", "1M", "16M") for codec in ("none", "int8")
    ]
    texts += [f"all_reduce:1M:{codec}" for codec in ("bf16", "int4", "fp8_e4m3", "topk")]
    texts += [
        f"hook:{buckets}:{codec}"
        for buckets in ("32:16K", "8:256K", "4:4M", "2:25M")
        for codec in ("none", "int8")
    ]
    texts += [f"hook:8:256K:{codec}" for codec in ("bf16", "int4", "topk")]
    texts += [f"{verb}:1M:{codec}" for verb in VERBS for codec in codecs.names()]
    return [Case.parse(text) for text in texts]


def choose_cases(texts: list[str] | None) -> list[Case]:
    """Return the cases that were asked for: a case by its text, or all default cases of a kind.

    Raises:
        ValueError: A text is neither a kind nor a case.
    """
    defaults = default_cases()
    if not texts:
        return defaults
    chosen: dict[Case, None] = {}  # without repetitions
    for text in texts:
        cases = [case for case in defaults if case.kind == text] if text in KINDS else [Case.parse(text)]
        chosen.update(dict.fromkeys(cases))
    return list(chosen)


class Checkout:
    """The ranks of one checkout."""

    def __init__(self, root: Path, ranks: int, folder: str) -> None:
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "PYTHONSAFEPATH": "1",  # nothing is imported from the folder of the script
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank in range(ranks):
            ours, theirs = Pipe()
            script = [str(RANK_SCRIPT), str(theirs.fileno()), str(rank), str(ranks), f"{folder}/store"]
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *script], cwd=root, env=environment, pass_fds=[theirs.fileno()]
                )
            )
            theirs.close()
            self._connections.append(ours)
        try:
            collect(self._connections, f"start of {root}", TIMEOUT_S)
            for origin in self.call("origin"):
                if not Path(origin).is_relative_to(root):
                    raise RankFailed(f"the ranks of {root} imported dtcomm from {origin}")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *, all_ranks: bool = True, **arguments: Any) -> list[Any]:
        """Return the method's results on all ranks, or on rank 0 alone."""
        connections = self._connections if all_ranks else self._connections[:1]
        for connection in connections:
            connection.send((method, arguments))
        return collect(connections, method, TIMEOUT_S)

    def prepare(self, case: Case) -> str:
        """Make the case ready to be measured; return the error if this checkout cannot run it, otherwise ""."""
        errors = self.call("prepare", all_ranks=case.collective, name=str(case), **asdict(case))
        return str(next(filter(None, errors), ""))

    def measure(self, case: Case, calls: int) -> float:
        """Return the seconds of a call on the slowest rank."""
        together = case.collective
        seconds: list[float] = self.call(
            "measure", all_ranks=together, name=str(case), calls=calls, together=together
        )
        return max(seconds)

    def close(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class Comparison:
    """The times of a case on both checkouts, and their ratios by round.

    Attributes:
        case: The case.
        this: Seconds of a call on this checkout.
        other: Seconds of a call on the other one.
        ratio: This checkout's time divided by the other's in the same round.
    """

    case: Case
    this: Timing
    other: Timing
    ratio: Timing

    @classmethod
    def of(cls, case: Case, rounds: list[dict[str, float]]) -> Comparison:
        """Summarize the seconds of every round, by side."""
        return cls(
            case,
            this=Timing.of([seconds["this"] for seconds in rounds]),
            other=Timing.of([seconds["other"] for seconds in rounds]),
            ratio=Timing.of([seconds["this"] / seconds["other"] for seconds in rounds]),
        )

    def cells(self) -> list[str]:
        """Return the row of the table."""
        return [
            str(self.case),
            report.microseconds(self.other.median),
            report.microseconds(self.this.median),
            f"{self.ratio.median:.3f}",
            f"{self.ratio.low:.3f} to {self.ratio.high:.3f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the row of the result file."""
        return {
            "case": str(self.case),
            "other": self.other.as_dict(),
            "this": self.this.as_dict(),
            "ratio": round(self.ratio.median, 4),
            "ratio_quartiles": [round(self.ratio.low, 4), round(self.ratio.high, 4)],
        }


def take_turns(
    sides: dict[str, Checkout], cases: list[Case], rounds: range, budget: float
) -> tuple[dict[Case, list[dict[str, float]]], dict[Case, str]]:
    """Measure the cases in turns.

    Args:
        sides: The checkouts, by ``"this"`` and ``"other"``.
        cases: The cases.
        rounds: Numbers of the rounds; even ones begin with the first side, odd ones with the second.
        budget: About how many seconds one measurement takes.

    Returns:
        The seconds of every round and side, by case; and, for cases that a side cannot run, its error.
    """
    errors: dict[Case, str] = {}
    calls: dict[Case, int] = {}
    for case in cases:
        for side, checkout in sides.items():
            if error := checkout.prepare(case):
                errors[case] = f"{side} checkout: {error}"
        if case not in errors:
            seconds = max(checkout.measure(case, 3) for checkout in sides.values())
            calls[case] = iterations(seconds, budget)
    seconds_by_case: dict[Case, list[dict[str, float]]] = {case: [] for case in calls}
    for number in rounds:
        order = list(sides.items()) if number % 2 == 0 else list(sides.items())[::-1]
        for case, count in calls.items():
            seconds_by_case[case].append({side: checkout.measure(case, count) for side, checkout in order})
    return seconds_by_case, errors


def compare(
    other: Path, cases: list[Case], rounds: int, starts: int, ranks: int, budget: float
) -> dict[str, Any]:
    """Measure all cases on both checkouts.

    Returns:
        ``comparisons``, a list of `Comparison`, and ``errors``, the error of each case that could not be compared.
    """
    seconds: dict[Case, list[dict[str, float]]] = {}
    errors: dict[Case, str] = {}
    starts = min(starts, rounds)
    for start in range(starts):
        with ExitStack() as stack:
            sides = {}
            for side, root in zip(SIDES, (other, ROOT), strict=True):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dtcomm-compare-"))
                sides[side] = stack.enter_context(Checkout(root, ranks, folder))
            numbers = range(rounds * start // starts, rounds * (start + 1) // starts)
            measured, errors = take_turns(sides, cases, numbers, budget)
        for case, values in measured.items():
            seconds.setdefault(case, []).extend(values)
        print(f"{numbers.stop} of {rounds} rounds", file=sys.stderr)
    return {
        "comparisons": [Comparison.of(case, values) for case, values in seconds.items()],
        "errors": errors,
    }


def require_built(root: Path) -> Path:
    """Return the absolute path of a checkout.

    Raises:
        ValueError: The folder is not a checkout of dtcomm, or its native module was not built.
    """
    if not (root / "dtcomm" / "__init__.py").is_file():
        raise ValueError(f"{root} is not a checkout of dtcomm")
    if not list((root / "dtcomm").glob("_C.*so")):
        raise ValueError(f"{root} has no native module: run `make build` there first")
    return root.resolve()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "other", type=Path, metavar="OTHER", help="folder of the other checkout, built in place"
    )
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each case on each checkout")
    parser.add_argument(
        "--starts", type=int, default=4, help="how often the ranks are started; the rounds are divided"
    )
    parser.add_argument(
        "--cases", nargs="+", metavar="CASE", help="cases or kinds instead of all default cases"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.01, help="of one measurement (default: 0.01)")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.starts, options.ranks) < 1:
        parser.error("--rounds, --starts and --ranks must be at least 1")
    try:
        other, cases = require_built(options.other), choose_cases(options.cases)
    except ValueError as error:
        parser.error(str(error))
    measured = compare(other, cases, options.rounds, options.starts, options.ranks, options.seconds)
    comparisons: list[Comparison] = measured["comparisons"]
    report.table(
        f"{ROOT} / {other}, {options.ranks} ranks, {options.rounds} rounds",
        ["case", "other µs", "this µs", "this / other", "quartiles"],
        [comparison.cells() for comparison in comparisons],
    )
    for case, reason in measured["errors"].items():
        print(f"left out: {case}: {reason}")
    if comparisons:
        ratio = statistics.geometric_mean([comparison.ratio.median for comparison in comparisons])
        print(f"geometric mean of the ratios of {len(comparisons)} cases: {ratio:.3f}")
    result = {
        "other_commit": report.commit(other),
        "ranks": options.ranks,
        "rounds": options.rounds,
        "starts": options.starts,
        "rows": [comparison.as_dict() for comparison in comparisons],
        "left_out": {str(case): reason for case, reason in measured["errors"].items()},
    }
    if options.json:
        print(report.write(options.json, result))
    return result


if __name__ == "__main__":
    main()
