"""What the flight records of several ranks say together: who is missing what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SHARDED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")


@dataclass(frozen=True)
class Rank:
    """One rank of a communicator: its own record, None where it left none, and what others saw of it.

    ``last`` is the number of the last operation that it entered, as far as anybody knows.
    """

    rank: int
    name: str
    record: dict[str, Any] | None
    last: int
    gone: bool

    def operation(self, number: int) -> dict[str, Any] | None:
        """What it wrote of an operation."""
        operations = [] if self.record is None else self.record["operations"]
        return next((each for each in operations if each["number"] == number), None)


@dataclass(frozen=True)
class Verdict:
    """``kind`` is one of healthy, missing, stuck, mismatch, corrupt, unmade, failed; ``culprits`` are global ranks."""

    id: str
    kind: str
    sentence: str
    number: int
    culprits: list[int]
    ranks: list[Rank] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Nothing failed and nobody waits."""
        return self.kind == "healthy"


def judge(records: Sequence[dict[str, Any]]) -> list[Verdict]:
    """A verdict for each communicator that any of the records tells of."""
    told: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for communicator in record["communicators"]:
            told.setdefault(communicator["id"], []).append({**communicator, "rank": record["rank"]})
    return [_verdict(name, said) for name, said in sorted(told.items())]


def _verdict(name: str, said: list[dict[str, Any]]) -> Verdict:
    ranks = _ranks(said)
    unmade = next((each["failure"] for each in said if each["failure"] and not each["operations"]), "")
    if unmade and all(not each["operations"] for each in said):
        return Verdict(name, "unmade", unmade, 0, [], ranks)
    # The first operation that somebody entered and did not finish.
    open_ones = [
        operation["number"]
        for each in said
        for operation in each["operations"]
        if operation["state"] in ("started", "failed") and operation["started"]
    ]
    if not open_ones:
        return Verdict(name, "healthy", _healthy(ranks), max((r.last for r in ranks), default=0), [], ranks)
    number = min(open_ones)
    corrupt = next((each["failure"] for each in said if "arrived damaged" in each["failure"]), "")
    if corrupt:
        return Verdict(name, "corrupt", corrupt, number, _named(ranks, corrupt)[:1], ranks)
    statements: dict[str, list[int]] = {}
    for rank in ranks:
        operation = rank.operation(number)
        seen = operation["text"] if operation else _seen(said, rank.rank, number)
        if seen:
            statements.setdefault(seen, []).append(rank.rank)
    what = _what(ranks, number)
    missing = [rank for rank in ranks if rank.last < number]
    if len(statements) > 1:
        return _mismatch(name, number, statements, ranks)
    if missing:
        return _missing(name, number, what, missing, ranks)
    return _stuck(name, number, what, said, ranks)


def _ranks(said: list[dict[str, Any]]) -> list[Rank]:
    found = []
    own = {each["rank"]: each for each in said}
    for rank, name in zip(said[0]["ranks"], said[0]["names"], strict=True):
        seen = [each for one in said for each in one["seen"] if each["rank"] == rank]
        record = own.get(rank)
        entered = [
            each["number"] for each in (record["operations"] if record else []) if each["started"] is not None
        ]
        gone = record is None and any(not each["alive"] for each in seen)
        last = max([*entered, *(each["last"] for each in seen)], default=0)
        found.append(Rank(rank, name, record, last, gone))
    return found


def _seen(said: list[dict[str, Any]], rank: int, number: int) -> str:
    for one in said:
        for each in one["seen"]:
            if each["rank"] == rank and each["last"] == number:
                return str(each["text"])
    return ""


def _what(ranks: list[Rank], number: int) -> str:
    """``all_reduce #41 of 25 MB``."""
    operation = next(found for rank in ranks if (found := rank.operation(number)))
    each = " a rank" if operation["collective"] in SHARDED else ""
    return f"{operation['collective']} #{number} of {size(operation['bytes'])}{each}"


def _healthy(ranks: list[Rank]) -> str:
    lasts = sorted({rank.last for rank in ranks})
    if len(lasts) == 1:
        return (
            f"nothing is missing: {listing([rank.rank for rank in ranks])} finished all {lasts[0]} operations"
        )
    behind = [rank.rank for rank in ranks if rank.last == lasts[0]]
    return f"no operation is under way; {listing(behind)} made {lasts[0]} calls, the others up to {lasts[-1]}"


def _mismatch(name: str, number: int, statements: dict[str, list[int]], ranks: list[Rank]) -> Verdict:
    # The fewest are the odd ones; on a tie those without the lowest rank.
    odd = min(statements.values(), key=lambda some: (len(some), -min(some)))
    parts = [f"{listing(some)} called {text}" for text, some in statements.items()]
    sentence = f"the ranks disagree on operation #{number}: " + ", but ".join(parts)
    return Verdict(name, "mismatch", sentence, number, odd, ranks)


def _missing(name: str, number: int, what: str, missing: list[Rank], ranks: list[Rank]) -> Verdict:
    late = [rank.rank for rank in missing]
    waiting = [rank.rank for rank in ranks if rank.rank not in late and rank.record is not None]
    lasts = sorted({rank.last for rank in missing})
    last = "it made no call at all" if lasts == [0] else f"the last it entered is #{lasts[-1]}"
    if len(missing) > 1:
        last = last.replace("it ", "they ", 1) if lasts == [0] else f"the last they entered is #{lasts[-1]}"
    came = _came(missing, ranks, number)
    if came:
        who = f"{listing(late)} came {came:.3g} s too late to {what} that {listing(waiting)} waited for"
        return Verdict(name, "missing", f"{who} ({last} in time)", number, late, ranks)
    who = f"{listing(late)} never entered {what} that {listing(waiting)} {_wait(waiting)} for"
    return Verdict(name, "missing", f"{who} ({last}{_silent(missing)})", number, late, ranks)


def _came(missing: list[Rank], ranks: list[Rank], number: int) -> float:
    """How long after the first that gave up the last of the missing ones called; 0 where one never did."""
    calls = [float(operation["issued"]) for rank in missing if (operation := rank.operation(number))]
    ends = [
        float(operation["finished"])
        for rank in ranks
        if rank not in missing and (operation := rank.operation(number)) and operation["finished"]
    ]
    if len(calls) < len(missing) or not ends:
        return 0.0
    return max(0.0, max(calls) - min(ends))


def _stuck(name: str, number: int, what: str, said: list[dict[str, Any]], ranks: list[Rank]) -> Verdict:
    silent = [rank for rank in ranks if rank.record is None]
    if not silent:
        blamed = _chain(said, number)
        silent = [rank for rank in ranks if rank.rank in blamed]
    if not silent:
        failure = next((each["failure"] for each in said if each["failure"]), "no rank says why")
        return Verdict(name, "failed", f"{what} failed on all ranks: {failure}", number, [], ranks)
    culprits = [rank.rank for rank in silent]
    waiting = [rank.rank for rank in ranks if rank.record is not None and rank.rank not in culprits]
    verb = "does" if len(culprits) == 1 else "do"
    sentence = f"{listing(culprits)} entered {what} and {verb} not go on; {listing(waiting)} {_wait(waiting)}"
    it = "it" if len(culprits) == 1 else "them"
    return Verdict(name, "stuck", f"{sentence} for {it}{_silent(silent, ' (', ')')}", number, culprits, ranks)


def _chain(said: list[dict[str, Any]], number: int) -> set[int]:
    """Who is waited for at the end of each chain of waits."""
    waits = {
        each["rank"]: operation["waiting_for"]
        for each in said
        for operation in each["operations"]
        if operation["number"] == number and operation["waiting_for"] is not None
    }
    ends = set()
    for rank in waits:
        passed: set[int] = set()
        while rank in waits and rank not in passed:
            passed.add(rank)
            rank = waits[rank]
        if rank not in passed:
            ends.add(rank)
    return ends


def _silent(ranks: list[Rank], before: str = "; ", after: str = "") -> str:
    """What is known of ranks without a record."""
    unheard = [rank for rank in ranks if rank.record is None]
    if not unheard:
        return ""
    it = "it" if len(unheard) == 1 else "they"
    if all(rank.gone for rank in unheard):
        return f"{before}{'its process is' if it == 'it' else 'their processes are'} gone{after}"
    return f"{before}{it} left no record: stopped, killed or busy elsewhere{after}"


def _named(ranks: list[Rank], text: str) -> list[int]:
    """The ranks that a text names, in its order."""
    at = {rank.rank: text.find(rank.name) for rank in ranks}
    return [rank for rank, place in sorted(at.items(), key=lambda item: item[1]) if place >= 0]


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def listing(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    if not ranks:
        return "nobody"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(words)


def size(count: int) -> str:
    """``25 MB``, ``4 KB``: as MiB and KiB, rounded."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024 or unit == "GB":
            return f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError
