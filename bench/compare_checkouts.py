"""Compare the speed of this checkout with that of another built checkout, case by case, in one run.

python -m bench.compare_checkouts OTHER [--rounds 12] [--cases CASE ...] [--ranks 2] [--json FILE]

The ranks of both checkouts stay alive and take turns within every round, so that a change of the machine's speed
affects both. They are started several times (--starts), because a time also depends on which memory pages a process
gets. A ratio is this checkout's time divided by the other's in the same round: above 1 this checkout is slower.

A case is one of

  all_reduce:SIZE:CODEC           an average of SIZE bytes of fp32, in place; likewise reduce_scatter, all_gather,
                                  all_to_all, broadcast and sendrecv, where SIZE is that of the larger tensor
  repeated:SIZE:CODEC             a hundred averages of one tensor, by all_reduce_init where a checkout has it
  backend:COLLECTIVE:SIZE         the call of torch.distributed on backend "dtcomm"
  hook:BUCKETS:SIZE:CODEC         a step of DDP with the hook, with BUCKETS buckets of SIZE bytes
  encode:SIZE:CODEC               encode SIZE bytes of fp32, on one rank; also decode and reduce_encode
  launches:BUCKETS:SIZE:CODEC     kernels and operators that the hook starts on tensors of a fake CUDA device: a count,
                                  taken once with each checkout's tests/support, and no part of the mean

such as hook:8:256K:int8. Without --cases several sizes of each kind are measured, and every codec: about three minutes
on a machine with two free cores. A kind alone, such as encode, stands for its default cases. A case that one of the
checkouts does not have is reported and left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
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
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "sendrecv")
LAUNCHES = "launches"
# The fields of a case, and examples of them.
FORMS = {kind: ["SIZE", "CODEC"] for kind in (*COLLECTIVES, "repeated", *VERBS)} | {
    "backend": ["COLLECTIVE", "SIZE"],
    "hook": ["BUCKETS", "SIZE", "CODEC"],
    LAUNCHES: ["BUCKETS", "SIZE", "CODEC"],
}
EXAMPLES = {"BUCKETS": "8", "SIZE": "1M", "CODEC": "int8", "COLLECTIVE": "all_reduce"}
SIDES = ("other", "this")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """One measured operation; ``str()`` is the inverse of `parse`."""

    kind: str
    nbytes: int
    codec: str
    buckets: int = 1
    call: str = ""

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case that ``text`` describes.

        Raises:
            ValueError: The kind is unknown, or the text does not have its form.
        """
        kind, _, arguments = text.partition(":")
        if kind not in FORMS:
            raise ValueError(f"case {text!r}: the kind {kind!r} is none of {', '.join(FORMS)}")
        form = FORMS[kind]
        try:
            fields = dict(zip(form, arguments.split(":", len(form) - 1), strict=True))
            case = cls(
                kind,
                report.parse_size(fields["SIZE"]),
                fields.get("CODEC", "none"),
                int(fields.get("BUCKETS", 1)),
                fields.get("COLLECTIVE", ""),
            )
        except ValueError:
            example = ":".join([kind, *(EXAMPLES[word] for word in form)])
            raise ValueError(
                f"case {text!r}: expected {':'.join([kind, *form])}, such as {example}"
            ) from None
        if case.nbytes < 4 or case.buckets < 1 or not case.codec:
            raise ValueError(
                f"case {text!r}: SIZE must be at least 4 bytes, BUCKETS at least 1, CODEC not empty"
            )
        if kind == "backend" and case.call not in COLLECTIVES:
            raise ValueError(
                f"case {text!r}: the collective {case.call!r} is none of {', '.join(COLLECTIVES)}"
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
        fields = {"SIZE": size, "CODEC": self.codec, "BUCKETS": str(self.buckets), "COLLECTIVE": self.call}
        return ":".join([self.kind, *(fields[word] for word in FORMS[self.kind])])

    @property
    def collective(self) -> bool:
        """Whether all ranks take part."""
        return self.kind not in VERBS


def default_cases() -> list[Case]:
    """Return all collectives and the DDP hook at several sizes and codecs, and every codec's verbs at 1 MB."""
    texts = [
        f"all_reduce:{size}:{codec}" for size in ("1K", "64K", "1M", "16M") for codec in ("none", "int8")
    ]
    texts += [f"all_reduce:1M:{codec}" for codec in ("bf16", "int4", "fp8_e4m3", "topk")]
    texts += [f"{name}:{case}" for name in COLLECTIVES[1:] for case in ("1K:none", "1M:none", "1M:int8")]
    texts += ["repeated:1K:none", "repeated:1K:int8"]
    texts += [f"backend:{name}:{size}" for name in COLLECTIVES for size in ("1K", "1M")]
    texts += [
        f"hook:{buckets}:{codec}"
        for buckets in ("32:16K", "8:256K", "4:4M", "2:25M")
        for codec in ("none", "int8")
    ]
    texts += [f"hook:8:256K:{codec}" for codec in ("bf16", "int4", "topk")]
    texts += [f"{LAUNCHES}:4:256K:{codec}" for codec in ("none", "int8", "topk", "powersgd")]
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
        cases = [case for case in defaults if case.kind == text] if text in FORMS else [Case.parse(text)]
        chosen.update(dict.fromkeys(cases))
    return list(chosen)


class Checkout:
    """The ranks of one checkout, perhaps with more environment variables."""

    def __init__(self, root: Path, ranks: int, folder: str, **variables: str) -> None:
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "PYTHONSAFEPATH": "1",  # nothing is imported from the folder of the script
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
            **variables,
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

    def count_launches(self, case: Case) -> tuple[dict[str, int], str]:
        """Return how often rank 0 started each kernel in a step, and the error if that failed."""
        arguments: dict[str, Any] = {"buckets": case.buckets, "nbytes": case.nbytes, "codec": case.codec}
        answers: list[tuple[dict[str, int], str]] = self.call("launches", **arguments)
        return answers[0]

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
    starts = min(starts, rounds) if cases else 0
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


def count_launches(
    other: Path, cases: list[Case], ranks: int
) -> tuple[list[dict[str, Any]], dict[Case, str]]:
    """Return what the hook starts on a fake device: a row for each case, and the errors of those without a row."""
    counts: dict[Case, dict[str, Any]] = {case: {} for case in cases}
    errors: dict[Case, str] = {}
    for side, root in zip(SIDES, (other, ROOT), strict=True) if cases else ():
        with tempfile.TemporaryDirectory(prefix="dtcomm-compare-") as folder:
            with Checkout(root, ranks, folder, DTCOMM_RUNTIME="process_group") as checkout:
                for case in cases:
                    counted, error = checkout.count_launches(case)
                    counts[case][side] = counted
                    if error:
                        errors.setdefault(case, f"{side} checkout: {error}")
    rows = [{"case": str(case), **counts[case]} for case in cases if case not in errors]
    return rows, errors


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


def launch_cells(row: dict[str, Any]) -> list[str]:
    """Return the sums of a row and how the counts differ."""
    this, other = Counter(row["this"]), Counter(row["other"])

    def more(a: Counter[str], b: Counter[str]) -> str:
        return ", ".join(f"{count} {name}" for name, count in (a - b).items()) or "-"

    return [row["case"], str(other.total()), str(this.total()), more(this, other), more(other, this)]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "other", type=Path, metavar="OTHER", help="folder of the other checkout, built in place"
    )
    parser.add_argument("--rounds", type=int, default=12, help="measurements of each case on each checkout")
    parser.add_argument(
        "--starts", type=int, default=2, help="how often the ranks are started; the rounds are divided"
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
    timed = [case for case in cases if case.kind != LAUNCHES]
    counted, errors = count_launches(other, [case for case in cases if case.kind == LAUNCHES], options.ranks)
    measured = compare(other, timed, options.rounds, options.starts, options.ranks, options.seconds)
    errors |= measured["errors"]
    comparisons: list[Comparison] = measured["comparisons"]
    report.table(
        f"{ROOT} / {other}, {options.ranks} ranks, {options.rounds} rounds",
        ["case", "other µs", "this µs", "this / other", "quartiles"],
        [comparison.cells() for comparison in comparisons],
    )
    if counted:
        report.table(
            "launches of a step of the hook on a fake CUDA device: kernels and operators",
            ["case", "other", "this", "this alone", "other alone"],
            [launch_cells(row) for row in counted],
        )
    for case, reason in errors.items():
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
        "launches": counted,
        "left_out": {str(case): reason for case, reason in errors.items()},
    }
    if options.json:
        print(report.write(options.json, result))
    return result


if __name__ == "__main__":
    main()
