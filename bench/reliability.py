"""The kept results of the stress programs (python -m tests.stress), and docs/results/reliability.md from them.

A file of bench/results/reliability holds one program: the goal, and one entry for each part that has run, with the
command, commit, processor, date, seconds, counts and failures. Counts of parts are added up. Parts of an earlier commit
are dropped when one of another commit is kept, and short runs when a part of a full run is: a figure is never put
together from two trees, and a short run never counts towards the goal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.common import conditions, output, pages

FOLDER = output.RESULTS / "reliability"
#: Parts of dtcomm that no stress program imports, and those that only the elastic one does. A test follows the imports.
NOT_IMPORTED = (
    *("_message_codec.py", "batch_norm.py", "cli", "context_parallel", "ddp", "fsdp"),
    *("mesh", "moe", "pipeline", "planner/job"),
    # What ``dtcomm plan`` alone uses of the planner.
    *("planner/core_costs.py", "planner/sweep.py", "planner/training_model.py"),
    # The links of benchmarks and of tests.
    *("measure/netns.py", "measure/delayed_link.py"),
)
ELASTIC = ("compress", "elastic", "frameworks", "local_sgd", "profiling", "tp")
_TREE = ("dtcomm", "csrc", "tests/support", "cmake", "CMakeLists.txt", "setup.py")
_LEFT_OUT = (
    ":(exclude)*.md",
    # What other tests alone import.
    *(":(exclude)tests/support/autotune_simulation.py", ":(exclude)tests/support/import_rules.py"),
    *(f":(exclude)dtcomm/{part}" for part in NOT_IMPORTED),
    # What only GPUs run, and its emulation.
    *(":(exclude)csrc/cuda", ":(exclude)csrc/emulator", ":(exclude)csrc/python/cuda*"),
    *(":(exclude)dtcomm/runtime/cuda_peer", ":(exclude)dtcomm/kernels/triton", ":(exclude)cmake/cuda.cmake"),
)
#: What the counts of the elastic program depend on, besides its own files. Documents, benchmarks and the list of the
#: programs' parts do not make a tree another one; each part is kept with its command.
TESTED_WITH_ELASTIC = (*_TREE, *_LEFT_OUT)
#: What the counts of the other programs depend on.
TESTED = (*TESTED_WITH_ELASTIC, *(f":(exclude)dtcomm/{part}" for part in ELASTIC))
#: Names of the programs, in the order of the page; tests.stress.programs defines them.
NAMES = ("fuzz", "operations", "soak", "campaign", "torch_suite", "elastic", "rendezvous", "limits")

Counts = dict[str, float]


def tested_commit(paths: Sequence[str] = TESTED) -> str:
    """Return the short hash of the last commit that changed what was tested."""
    return conditions.code_commit(paths=paths)


@dataclass(kw_only=True)
class Entry:
    """One part of a program that has run.

    Attributes:
        part: Its number, from 1; 0 is a short run.
        command: The command that runs it again.
        seconds: How long it took.
        counts: What it did, by name.
        failures: What was wrong, each as a sentence.
        commit: The last commit that changed what was tested.
        processor: The processor's name.
        date: The day it ended.
    """

    part: int
    command: str
    seconds: float
    counts: Counts
    failures: list[str]
    commit: str = field(default_factory=tested_commit)
    processor: str = field(default_factory=conditions.processor)
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d", time.gmtime()))


@dataclass(kw_only=True)
class Kept:
    """The kept result of one program.

    Attributes:
        program: Its name.
        what: What it shows.
        command: The command that runs all parts that are missing.
        goal: The counts that all parts together have to reach.
        parts: The number of parts of a full run.
        planned_seconds: How long they take together on two cores.
        entries: The parts that have run, or one short run.
    """

    program: str
    what: str
    command: str
    goal: Counts
    parts: int
    planned_seconds: int
    entries: list[Entry] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Return the file of the result."""
        return FOLDER / f"{self.program}.json"

    @property
    def short(self) -> bool:
        """Return whether the entry is a short run."""
        return any(entry.part == 0 for entry in self.entries)

    @property
    def counts(self) -> Counts:
        """Return the counts of all entries together."""
        total: Counts = {}
        for entry in self.entries:
            for name, value in entry.counts.items():
                total[name] = total.get(name, 0) + value
        return total

    @property
    def complete(self) -> bool:
        """Return whether all parts have run, and reach the goal."""
        reached = all(self.counts.get(name, 0) >= least for name, least in self.goal.items())
        return reached and {entry.part for entry in self.entries} == set(range(1, self.parts + 1))

    @property
    def verdict(self) -> str:
        """Return the page's verdict: a short run or a part of a full one passes nothing."""
        if not self.entries:
            return "not run"
        if failures := sum(len(entry.failures) for entry in self.entries):
            return f"**{failures} failed**"
        if self.short:
            return "**short run only**"
        return "passed" if self.complete else f"**{len(self.entries)} of {self.parts} parts**"

    def add(self, entry: Entry) -> None:
        """Put an entry in the place of what it replaces.

        Entries of another commit go, short ones when a part of a full run comes, and the earlier run of a part.
        """

        def stays(earlier: Entry) -> bool:
            same_run = earlier.commit == entry.commit and (earlier.part == 0) == (entry.part == 0)
            return same_run and earlier.part != entry.part

        self.entries = sorted([*filter(stays, self.entries), entry], key=lambda kept: kept.part)

    def missing(self, commit: str) -> list[int]:
        """Return the numbers of the parts that have not run on a commit."""
        done = {entry.part for entry in self.entries if entry.commit == commit and not entry.failures}
        return [part for part in range(1, self.parts + 1) if part not in done]

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of the file."""
        return asdict(self)


def from_dict(document: dict[str, Any]) -> Kept:
    """Return the result that a file contains."""
    return Kept(**{**document, "entries": [Entry(**entry) for entry in document["entries"]]})


def read(path: Path) -> Kept:
    """Return the result in a file."""
    return from_dict(json.loads(path.read_text(encoding="utf-8")))


def write(kept: Kept, path: Path) -> None:
    """Replace a file."""
    output.write_whole(path, output.format_json(kept.as_dict()))


def page(*documents: dict[str, Any]) -> str:
    """Return the tables of docs/results/reliability.md: goals beside counts, and all counts."""
    results = [from_dict(document) for document in documents]
    columns = ["program", "goal", "reached", "verdict", "time", "planned", "commit, date, processor"]
    rows = [
        [
            f"`{kept.command}`",
            ", ".join(f"{_number(value)} {name}" for name, value in kept.goal.items()),
            _reached(kept),
            kept.verdict,
            _duration(sum(entry.seconds for entry in kept.entries)),
            f"{_duration(kept.planned_seconds)} in {kept.parts} part{'s' * (kept.parts != 1)}",
            _origin(kept.entries),
        ]
        for kept in results
    ]
    lines = [pages.markdown(columns, rows), "", _summary(results), "", "What each did:", ""]
    for kept in results:
        counts = ", ".join(
            f"{_number(value)} {name}" for name, value in kept.counts.items() if ": " not in name
        )
        marked = " (short run)" if kept.short else ""
        lines.append(f"- `{kept.program}`: {kept.what}.{marked} {counts or 'It has not run on this tree'}.")
        lines += [f"    - failed: {text[:300]}" for entry in kept.entries for text in entry.failures]
    suite = next((kept for kept in results if kept.program == "torch_suite"), None)
    if suite is not None and suite.entries:
        lines += ["", _suite_table(suite)]
    return "\n".join(lines)


def _reached(kept: Kept) -> str:
    """Return the counts of the goal, with the share of the goal where it is not reached."""
    texts = []
    for name, least in kept.goal.items():
        value = kept.counts.get(name, 0)
        share = "" if value >= least else f" ({100 * value / least:.3g} %)"
        texts.append(f"{_number(value)}{share}")
    return ", ".join(texts)


def _summary(results: list[Kept]) -> str:
    """Return the sentence that says whether this page is evidence of the reliability of one tree."""
    lacking = [f"`{kept.program}`" for kept in results if not kept.complete]
    commits = sorted({entry.commit for kept in results for entry in kept.entries})
    if lacking:
        return (
            f"**The full runs are not complete**: {', '.join(lacking)}. A short run shows that the program works, "
            "and nothing about the goal."
        )
    if len(commits) > 1:
        return f"All programs have run at full length, on different commits: {', '.join(commits)}."
    return f"All programs have run at full length on commit {commits[0]}."


def _suite_table(kept: Kept) -> str:
    """Return what passed in torch's suite by number of ranks."""
    by_ranks: dict[str, Counts] = {}
    for name, value in kept.counts.items():
        ranks, separator, what = name.partition(": ")
        if separator:
            by_ranks.setdefault(ranks, {})[what] = value
    names = list(next(iter(by_ranks.values())))
    rows = [[ranks, *(_number(counts[name]) for name in names)] for ranks, counts in by_ranks.items()]
    return pages.markdown([f"torch's suite{' (short run)' * kept.short}", *names], rows, aligned=True)


def _origin(entries: Iterable[Entry]) -> str:
    """Return the commit, the days and the processors of entries."""
    fields = [sorted({getattr(entry, name) for entry in entries}) for name in ("commit", "date", "processor")]
    return ", ".join(" and ".join(values) for values in fields if values) or "–"


def _number(value: float) -> str:
    return f"{value:,.4g}" if isinstance(value, float) and value != int(value) else f"{int(value):,}"


def _duration(seconds: float) -> str:
    """Return ``25 s``, ``12 min`` or ``1 h 40 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
