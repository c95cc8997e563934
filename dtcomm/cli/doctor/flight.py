"""``dtcomm doctor --flight DIR``: the flight records of a run, read together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dtcomm.cli.doctor.diagnosis import Rank, Verdict, judge, listing, size


def report(directory: str, *, as_json: bool) -> int:
    """Print what the records say; 0 where nothing is wrong, 1 where something is, 2 where there are none."""
    records, unread = load(Path(directory))
    if not records:
        why = "; ".join(unread) or "no rank-*.json in it"
        print(f"dtcomm doctor: --flight {directory}: no flight records: {why}", file=sys.stderr)
        return 2
    verdicts = judge(records)
    healthy = all(verdict.healthy for verdict in verdicts)
    if as_json:
        said = {
            "ok": healthy,
            "records": [record["rank"] for record in records],
            "unreadable": unread,
            "communicators": [_as_dict(verdict) for verdict in verdicts],
        }
        print(json.dumps(said, indent=2))
        return 0 if healthy else 1
    for line in unread:
        print(f"note  {line}")
    # What is wrong first; a communicator that failed only because another one did comes after it.
    for verdict in sorted(verdicts, key=lambda each: each.healthy):
        _show(verdict)
    return 0 if healthy else 1


def load(directory: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records in rank order, and what could not be read."""
    records, unread = [], []
    for path in sorted(directory.glob("rank-*.json")):
        try:
            record = json.loads(path.read_text())
            if record["format"] != 1:
                raise ValueError(f"format {record['format']!r}, this dtcomm reads 1")
            records.append(record)
        except (OSError, ValueError, KeyError, TypeError) as error:
            unread.append(f"{path.name}: {error}")
    return sorted(records, key=lambda record: int(record["rank"])), unread


def _as_dict(verdict: Verdict) -> dict[str, Any]:
    return {
        "id": verdict.id,
        "kind": verdict.kind,
        "sentence": verdict.sentence,
        "operation": verdict.number,
        "culprits": verdict.culprits,
        "ranks": [
            {"rank": rank.rank, "last": rank.last, "recorded": rank.record is not None, "gone": rank.gone}
            for rank in verdict.ranks
        ],
    }


def _show(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    mark = "[green]ok[/]   " if verdict.healthy else "[red]FAIL[/] "
    console.print(f"{mark} {escape(verdict.sentence)}", soft_wrap=True)
    if verdict.healthy:
        return
    table = Table(title=f"communicator {escape(verdict.id)}: {listing([r.rank for r in verdict.ranks])}")
    for name in ("rank", "last entered", "state", "what", "size", "for", "waited for", "of"):
        table.add_column(name, justify="right" if name in ("rank", "last entered", "size", "for") else "left")
    for rank in verdict.ranks:
        table.add_row(
            *_row(rank, verdict.number),
            style="red" if rank.rank in verdict.culprits else "",
            end_section=False,
        )
    console.print(table)


def _row(rank: Rank, number: int) -> list[str]:
    who = rank.name.partition(" (")[2].rstrip(")")
    last = f"#{rank.last}" if rank.last else "-"
    operation = rank.operation(number)
    if operation is None:
        state = "gone" if rank.gone else "no record" if rank.record is None else "not there"
        return [str(rank.rank), last, state, "", "", "", "", who]
    ended, started = operation["finished"], operation["started"]
    seconds = f"{ended - started:.3g} s" if ended and started else ""
    waited = listing(operation["waited_for"]) if operation["waited_for"] else ""
    what = f"#{number} {operation['text']}"
    return [str(rank.rank), last, operation["state"], what, size(operation["bytes"]), seconds, waited, who]
