"""The text form of a schedule: one rank a row, one step a column.

    all_reduce ranks=3 chunks=3
    rank 0 | c2+1 | c1+1 | c0=1 | c2=1
    rank 1 | c0+2 | c2+2 | c1=2 | c0=2
    rank 2 | c1+0 | c0+0 | c2=0 | c1=0

A cell lists what the rank sends in that step: ``c2+1`` adds chunk 2 to rank 1's, ``c0=1,2`` copies chunk 0 to
ranks 1 and 2, ``c0+1@1`` crosses level 1 of the hierarchy, ``.`` is nothing. ``root=`` is written where it is
not 0.
"""

from __future__ import annotations

import re
from collections import defaultdict

from dtcomm.errors import ScheduleError
from dtcomm.schedule.ir import Op, Schedule, Transfer

_SIGNS: dict[str, Op] = {"+": "reduce", "=": "copy"}
_HEAD = re.compile(r"(\w+) ranks=(\d+) chunks=(\d+)(?: root=(\d+))?")
_ROW = re.compile(r"rank\s+(\d+)\s*((?:\|[^|]*)*)")
_CELL = re.compile(r"c(\d+)([+=])(\d+(?:,\d+)*)(?:@(\d+))?")


def write(schedule: Schedule) -> str:
    """The text form, without a newline at its end; columns are aligned."""
    cells: dict[tuple[int, int], dict[tuple[int, str, int], list[int]]] = defaultdict(dict)
    signs = {op: sign for sign, op in _SIGNS.items()}
    for t in schedule.transfers:
        cells[t.src, t.step].setdefault((t.chunk, signs[t.op], t.level), []).append(t.dst)

    rows = [[f"rank {rank:>{len(str(schedule.ranks - 1))}}"] for rank in range(schedule.ranks)]
    for step in range(schedule.steps):
        column = [_cell(cells[rank, step]) for rank in range(schedule.ranks)]
        width = max(len(cell) for cell in column)
        for row, cell in zip(rows, column, strict=True):
            row.append(f"{cell:<{width}}")
    root = f" root={schedule.root}" if schedule.root else ""
    head = f"{schedule.collective} ranks={schedule.ranks} chunks={schedule.chunks}{root}"
    return "\n".join([head, *(" | ".join(row).rstrip() for row in rows)])


def _cell(sends: dict[tuple[int, str, int], list[int]]) -> str:
    if not sends:
        return "."
    return " ".join(
        f"c{chunk}{sign}{','.join(map(str, sorted(peers)))}" + (f"@{level}" if level else "")
        for (chunk, sign, level), peers in sends.items()
    )


def parse(text: str) -> Schedule:
    """The schedule that ``text`` is the text form of.

    Raises ScheduleError naming the line, and the cell where there is one, that cannot be read.
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    head = _HEAD.fullmatch(lines[0] if lines else "")
    if head is None:
        raise ScheduleError(
            f"line 1: expected 'collective ranks=N chunks=C [root=R]', got {lines[0] if lines else ''!r}"
        )
    collective, ranks, chunks, root = head[1], int(head[2]), int(head[3]), int(head[4] or 0)
    if len(lines) != ranks + 1:
        raise ScheduleError(f"expected a row for each of {ranks} ranks, got {len(lines) - 1} rows")
    transfers: list[Transfer] = []
    for rank, line in enumerate(lines[1:]):
        row = _ROW.fullmatch(line)
        if row is None or int(row[1]) != rank:
            raise ScheduleError(f"line {rank + 2}: expected 'rank {rank} | ...', got {line!r}")
        for step, cell in enumerate(row[2].split("|")[1:]):
            transfers += _read(rank, step, cell.split())
    return Schedule(collective=collective, ranks=ranks, chunks=chunks, root=root, transfers=tuple(transfers))


def _read(rank: int, step: int, words: list[str]) -> list[Transfer]:
    if words == ["."]:
        return []
    transfers = []
    for word in words:
        cell = _CELL.fullmatch(word)
        if cell is None:
            raise ScheduleError(
                f"rank {rank} step {step}: expected like 'c0+1', 'c0=1,2' or '.', got {word!r}"
            )
        chunk, op, level = int(cell[1]), _SIGNS[cell[2]], int(cell[4] or 0)
        transfers += [Transfer(step, rank, int(peer), chunk, op, level) for peer in cell[3].split(",")]
    return transfers
