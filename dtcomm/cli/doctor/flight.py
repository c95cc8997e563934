"""``dtcomm doctor --flight DIR``: a diagnosis of each communicator from the flight records of several ranks.

`report` reads the records and prints the diagnoses. `diagnose` computes them: which rank did not enter an operation,
entered another one, or does not finish it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtcomm.cli import new_table
from dtcomm.profiling.summary import format_bytes
from dtcomm.system import printable

#: Collectives whose recorded size is that of one rank's shard.
SHARDED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")

# The part of a flight record about one communicator, with the rank that wrote it. ``operations`` are its own, and
# ``seen`` is what it knows of its peers.
CommunicatorRecord = dict[str, Any]

_TIME = (float, int, type(None))
_OPERATION = {
    **{"number": int, "text": str, "collective": str, "bytes": int, "state": str},
    **{"issued": (float, int), "started": _TIME, "finished": _TIME},
    **{"waiting_for": (int, type(None)), "waited_for": [int]},
}
_COMMUNICATOR = {
    **{"id": str, "ranks": [int], "names": [str], "failure": str, "operations": [_OPERATION]},
    "seen": [{"rank": int, "last": int, "text": str, "alive": bool}],
}
_RECORD = {"rank": int, "communicators": [_COMMUNICATOR]}


@dataclass(frozen=True)
class RankState:
    """State of one rank of a communicator; ``name`` is its rank, host and process, as error messages name it.

    Attributes:
        record: Its own record; None if it left none.
        last: Number of the last operation that it is known to have entered; 0 for none.
        gone: Whether it left no record and a peer saw that its process had ended.
    """

    rank: int
    name: str
    record: CommunicatorRecord | None
    last: int
    gone: bool

    def operation(self, number: int) -> dict[str, Any] | None:
        """Return this rank's record of an operation, or None if it has none."""
        operations = [] if self.record is None else self.record["operations"]
        return next((operation for operation in operations if operation["number"] == number), None)


@dataclass(frozen=True)
class Diagnosis:
    """State of one communicator; ``sentence`` is the diagnosis.

    Attributes:
        kind: One of healthy, missing, stuck, mismatch, corrupt, connecting (ranks wait for others to create it), unmade
            (it could not be created) and failed.
        number: Number of the first operation that did not finish; of the last operation if all finished.
        culprits: Global ranks at fault.
    """

    id: str
    kind: str
    sentence: str
    number: int
    culprits: list[int]
    ranks: list[RankState] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether nothing failed and no rank waits."""
        return self.kind == "healthy"


def report(directory: str, *, as_json: bool) -> int:
    """Print the diagnoses; return 0 if nothing is wrong, 1 if something is, or 2 if there are no records."""
    records, unreadable = load(Path(directory))
    if not records:
        reason = "; ".join(unreadable) or "no rank-*.json in it"
        print(f"dtcomm doctor: --flight {directory}: no flight records: {reason}", file=sys.stderr)
        return 2
    diagnoses = diagnose(records)
    healthy = all(diagnosis.healthy for diagnosis in diagnoses)
    if as_json:
        document = {
            "ok": healthy,
            "records": [record["rank"] for record in records],
            "unreadable": unreadable,
            "communicators": [_as_dict(diagnosis) for diagnosis in diagnoses],
        }
        print(json.dumps(document, indent=2))
        return 0 if healthy else 1
    for line in unreadable:
        print(f"note  {line}")
    for diagnosis in sorted(diagnoses, key=lambda diagnosis: diagnosis.healthy):  # failures first
        _print(diagnosis)
    return 0 if healthy else 1


def load(directory: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records in rank order, and a line for each file that could not be read or is damaged."""
    records: dict[int, dict[str, Any]] = {}
    names: dict[int, str] = {}
    unreadable = []
    for path in sorted(directory.glob("rank-*.json")):
        name = printable(path.name)
        try:
            if not path.is_file():
                raise ValueError("it is no file")
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record, dict) and record.get("format") != 1:
                raise ValueError(f"format {record.get('format')!r}, this dtcomm reads 1")
            record = _checked(record, _RECORD, "record")
            rank = record["rank"]
            if rank in records:
                raise ValueError(f"rank {rank} is that of {names[rank]} too")
            for made in record["communicators"]:
                if rank not in made["ranks"] or not len(made["ranks"]) == len(set(made["ranks"])) == len(
                    made["names"]
                ):
                    raise ValueError(f"communicator {made['id']!r}: its ranks or names are damaged")
            records[rank], names[rank] = record, name
        except (OSError, ValueError, RecursionError) as error:
            unreadable.append(printable(f"{name}: {error}"))
    members = Counter(
        (made["id"], *made["ranks"]) for record in records.values() for made in record["communicators"]
    )
    usual = {id: ranks for (id, *ranks), _ in reversed(members.most_common())}
    for rank, record in list(records.items()):
        if odd := [made["id"] for made in record["communicators"] if made["ranks"] != usual[made["id"]]]:
            del records[rank]
            unreadable.append(f"{names[rank]}: communicator {odd[0]!r} has other ranks than in other records")
    return [records[rank] for rank in sorted(records)], unreadable


def _checked(value: Any, form: Any, name: str) -> Any:
    """Return a value of a record in a form such as `_RECORD`, without control characters; ValueError names it.

    A form is a mapping of entries, a list with the form of its entries, or types. Numbers are finite and at least 0.
    """
    if isinstance(form, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected an object")
        return {**value, **{key: _checked(value.get(key), of, f"{name}.{key}") for key, of in form.items()}}
    if isinstance(form, list):
        if not isinstance(value, list):
            raise ValueError(f"{name}: expected a list")
        return [_checked(entry, form[0], f"{name}[{index}]") for index, entry in enumerate(value)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, form) or (is_number and not 0 <= value < 2**63):
        raise ValueError(f"{name}: {str(value)[:60]!r} is not valid")
    return printable(value) if isinstance(value, str) else value


def _as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    ranks = [
        {"rank": rank.rank, "last": rank.last, "recorded": rank.record is not None, "gone": rank.gone}
        for rank in diagnosis.ranks
    ]
    names = ("id", "kind", "sentence", "culprits")
    return {
        **{name: getattr(diagnosis, name) for name in names},
        "operation": diagnosis.number,
        "ranks": ranks,
    }


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    mark = "[green]ok[/]   " if diagnosis.healthy else "[red]FAIL[/] "
    console.print(f"{mark} {escape(diagnosis.sentence)}", soft_wrap=True)
    if diagnosis.healthy:
        return
    ranks = format_ranks([rank.rank for rank in diagnosis.ranks])
    columns = (">rank", ">~last entered", "~state", "~what", ">size", ">for", "~waited for", "~of")
    table = new_table(columns, f"communicator {escape(diagnosis.id)}: {ranks}")
    for rank in diagnosis.ranks:
        style = "red" if rank.rank in diagnosis.culprits else ""
        table.add_row(*_cells(rank, diagnosis.number), style=style)
    console.print(table)


def _cells(rank: RankState, number: int) -> list[str]:
    process = rank.name.partition(" (")[2].rstrip(")")
    last = f"#{rank.last}" if rank.last else "-"
    operation = rank.operation(number)
    if operation is None:
        state = "gone" if rank.gone else "no record" if rank.record is None else "not there"
        return [str(rank.rank), last, state, "", "", "", "", process]
    ended, started = operation["finished"], operation["started"]
    return [
        str(rank.rank),
        last,
        operation["state"],
        f"#{number} {operation['text']}",
        format_bytes(operation["bytes"]),
        f"{ended - started:.3g} s" if ended and started else "",
        format_ranks(operation["waited_for"]) if operation["waited_for"] else "",
        process,
    ]


def diagnose(records: Sequence[dict[str, Any]]) -> list[Diagnosis]:
    """Return a diagnosis of each communicator in the ranks' flight records."""
    by_id: dict[str, list[CommunicatorRecord]] = {}
    for record in records:
        for communicator in record["communicators"]:
            by_id.setdefault(communicator["id"], []).append({**communicator, "rank": record["rank"]})
    return [_diagnose(id, communicator_records) for id, communicator_records in sorted(by_id.items())]


def _diagnose(id: str, records: list[CommunicatorRecord]) -> Diagnosis:
    ranks = _rank_states(records)
    if all(not record["operations"] for record in records):
        failure = next((record["failure"] for record in records if record["failure"]), "")
        if failure:
            return Diagnosis(id, "unmade", failure, 0, [], ranks)
        waiting = [record["rank"] for record in records if record.get("connecting")]
        if waiting:
            return _connecting(id, waiting, ranks)
    unfinished = [
        operation["number"]
        for record in records
        for operation in record["operations"]
        if operation["state"] in ("started", "failed") and operation["started"]
    ]
    if not unfinished:
        last = max((rank.last for rank in ranks), default=0)
        return Diagnosis(id, "healthy", _healthy_sentence(ranks), last, [], ranks)
    number = min(unfinished)
    corrupt = next((record["failure"] for record in records if "arrived damaged" in record["failure"]), "")
    if corrupt:
        return Diagnosis(id, "corrupt", corrupt, number, _ranks_named_in(corrupt, ranks)[:1], ranks)
    ranks_by_call: dict[str, list[int]] = {}
    for rank in ranks:
        operation = rank.operation(number)
        call = operation["text"] if operation else _call_seen_by_peers(records, rank.rank, number)
        if call:
            ranks_by_call.setdefault(call, []).append(rank.rank)
    if len(ranks_by_call) > 1:
        return _mismatch(id, number, ranks_by_call, ranks)
    description = _describe_operation(ranks, number)
    missing = [rank for rank in ranks if rank.last < number]
    if missing:
        return _missing(id, number, description, missing, ranks)
    return _stuck(id, number, description, records, ranks)


def _connecting(id: str, waiting: list[int], ranks: list[RankState]) -> Diagnosis:
    culprits = [rank.rank for rank in ranks if rank.rank not in waiting]
    others = format_ranks(culprits) if culprits else "each other"
    sentence = f"{format_ranks(waiting)} {_wait(waiting)} for {others} to make the communicator"
    if culprits:
        sentence += ": every rank of the group has to call"
    return Diagnosis(id, "connecting", sentence, 0, culprits, ranks)


def _rank_states(records: list[CommunicatorRecord]) -> list[RankState]:
    states = []
    record_of = {record["rank"]: record for record in records}
    for rank, name in zip(records[0]["ranks"], records[0]["names"], strict=True):
        sightings = [seen for record in records for seen in record["seen"] if seen["rank"] == rank]
        own = record_of.get(rank)
        operations = own["operations"] if own else []
        entered = [operation["number"] for operation in operations if operation["started"] is not None]
        gone = own is None and any(not seen["alive"] for seen in sightings)
        last = max([*entered, *(seen["last"] for seen in sightings)], default=0)
        states.append(RankState(rank, name, own, last, gone))
    return states


def _call_seen_by_peers(records: list[CommunicatorRecord], rank: int, number: int) -> str:
    """Return the call that ``rank`` made as operation ``number`` according to its peers, or an empty string."""
    for record in records:
        for seen in record["seen"]:
            if seen["rank"] == rank and seen["last"] == number:
                return str(seen["text"])
    return ""


def _describe_operation(ranks: list[RankState], number: int) -> str:
    """Return a description such as ``all_reduce #41 of 25.0 MiB``."""
    operation = next(operation for rank in ranks if (operation := rank.operation(number)))
    per_rank = " a rank" if operation["collective"] in SHARDED else ""
    return f"{operation['collective']} #{number} of {format_bytes(operation['bytes'])}{per_rank}"


def _healthy_sentence(ranks: list[RankState]) -> str:
    lasts = sorted({rank.last for rank in ranks})
    if len(lasts) == 1:
        names = format_ranks([rank.rank for rank in ranks])
        return f"nothing is missing: {names} finished all {lasts[0]} operations"
    behind = format_ranks([rank.rank for rank in ranks if rank.last == lasts[0]])
    return f"no operation is under way; {behind} made {lasts[0]} calls, the others up to {lasts[-1]}"


def _mismatch(id: str, number: int, ranks_by_call: dict[str, list[int]], ranks: list[RankState]) -> Diagnosis:
    # The smallest group is at fault; of equal groups the one without the lowest rank.
    culprits = min(ranks_by_call.values(), key=lambda group: (len(group), -min(group)))
    parts = [f"{format_ranks(group)} called {call}" for call, group in ranks_by_call.items()]
    sentence = f"the ranks disagree on operation #{number}: " + ", but ".join(parts)
    return Diagnosis(id, "mismatch", sentence, number, culprits, ranks)


def _missing(
    id: str, number: int, description: str, missing: list[RankState], ranks: list[RankState]
) -> Diagnosis:
    culprits = [rank.rank for rank in missing]
    waiting = [rank.rank for rank in ranks if rank.rank not in culprits and rank.record is not None]
    lasts = sorted({rank.last for rank in missing})
    pronoun = "it" if len(missing) == 1 else "they"
    last = f"{pronoun} made no call at all" if lasts == [0] else f"the last {pronoun} entered is #{lasts[-1]}"
    late = _seconds_late(missing, ranks, number)
    if late:
        sentence = (
            f"{format_ranks(culprits)} came {late:.3g} s too late to {description} that {format_ranks(waiting)} "
            f"waited for ({last} in time)"
        )
    else:
        sentence = (
            f"{format_ranks(culprits)} never entered {description} that {format_ranks(waiting)} {_wait(waiting)} "
            f"for ({last}{_why_no_record(missing)})"
        )
    return Diagnosis(id, "missing", sentence, number, culprits, ranks)


def _seconds_late(missing: list[RankState], ranks: list[RankState], number: int) -> float:
    """Return the seconds from the first rank's failure to the last missing rank's call; 0 if one never called."""
    calls = [float(operation["issued"]) for rank in missing if (operation := rank.operation(number))]
    ends = [
        float(operation["finished"])
        for rank in ranks
        if rank not in missing and (operation := rank.operation(number)) and operation["finished"]
    ]
    if len(calls) < len(missing) or not ends:
        return 0.0
    return max(0.0, max(calls) - min(ends))


def _stuck(
    id: str, number: int, description: str, records: list[CommunicatorRecord], ranks: list[RankState]
) -> Diagnosis:
    stuck = [rank for rank in ranks if rank.record is None]
    if not stuck:
        waited_for = _ends_of_wait_chains(records, number)
        stuck = [rank for rank in ranks if rank.rank in waited_for]
    if not stuck:
        failure = next((record["failure"] for record in records if record["failure"]), "no rank says why")
        return Diagnosis(id, "failed", f"{description} failed on all ranks: {failure}", number, [], ranks)
    culprits = [rank.rank for rank in stuck]
    waiting = [rank.rank for rank in ranks if rank.record is not None and rank.rank not in culprits]
    verb, pronoun = ("does", "it") if len(culprits) == 1 else ("do", "them")
    sentence = (
        f"{format_ranks(culprits)} entered {description} and {verb} not go on; {format_ranks(waiting)} "
        f"{_wait(waiting)} for {pronoun}{_why_no_record(stuck, ' (', ')')}"
    )
    return Diagnosis(id, "stuck", sentence, number, culprits, ranks)


def _ends_of_wait_chains(records: list[CommunicatorRecord], number: int) -> set[int]:
    """Return the ranks that others wait for and that wait for no rank themselves; cycles of waits have none."""
    waits = {
        record["rank"]: operation["waiting_for"]
        for record in records
        for operation in record["operations"]
        if operation["number"] == number and operation["waiting_for"] is not None
    }
    ends = set()
    for rank in waits:
        visited: set[int] = set()
        while rank in waits and rank not in visited:
            visited.add(rank)
            rank = waits[rank]
        if rank not in visited:
            ends.add(rank)
    return ends


def _why_no_record(ranks: list[RankState], before: str = "; ", after: str = "") -> str:
    """Return what is known of those of ``ranks`` that left no record; an empty string if all left one."""
    silent = [rank for rank in ranks if rank.record is None]
    if not silent:
        return ""
    if all(rank.gone for rank in silent):
        return f"{before}{'its process is' if len(silent) == 1 else 'their processes are'} gone{after}"
    pronoun = "it" if len(silent) == 1 else "they"
    return f"{before}{pronoun} left no record: stopped, killed or busy elsewhere{after}"


def _ranks_named_in(text: str, ranks: list[RankState]) -> list[int]:
    """Return the ranks that a text names, in its order."""
    positions = {rank.rank: text.find(rank.name) for rank in ranks}
    named = [rank for rank, position in positions.items() if position >= 0]
    return sorted(named, key=lambda rank: positions[rank])


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text: ``rank 3``, ``ranks 0-2, 5``."""
    if not ranks:
        return "no rank"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)
