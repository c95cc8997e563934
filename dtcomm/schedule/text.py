"""The text form of a schedule: one rank per row, one step per column.

    all_reduce ranks=3 chunks=3
    rank 0 | c2+1 | c1+1 | c0=1 | c2=1
    rank 1 | c0+2 | c2+2 | c1=2 | c0=2
    rank 2 | c1+0 | c0+0 | c2=0 | c1=0

A cell lists what the rank sends in that step: ``c2+1`` adds chunk 2 to rank 1's, ``c0=1,2`` copies chunk 0 to ranks 1
and 2, ``c0+1@1`` crosses level 1 of the hierarchy, ``.`` means that the rank sends nothing. ``root=`` is written if it
is not 0. ``str(schedule)`` writes this form and `parse` reads it.
"""

from __future__ import annotations

import re

from dtcomm.errors import ScheduleError
from dtcomm.schedule.ir import OP_SIGNS, Schedule, Transfer

_OPS = {sign: op for op, sign in OP_SIGNS.items()}
_HEAD = re.compile(r"(\w+) ranks=(\d+) chunks=(\d+)(?: root=(\d+))?")
_ROW = re.compile(r"rank\s+(\d+)\s*((?:\|[^|]*)*)")
_SEND = re.compile(r"c(\d+)([+=])(\d+(?:,\d+)*)(?:@(\d+))?")


def parse(text: str) -> Schedule:
    """Read a schedule from its text form; the inverse of ``str(schedule)``.

    Args:
        text: The text form, as the module docstring of `dtcomm.schedule.text` describes it. Spaces need not align.

    Returns:
        The schedule. It is not verified yet; see `dtcomm.schedule.verify`.

    Raises:
        ScheduleError: If the text cannot be read. The message names the line or the cell.

    Example:
        >>> from dtcomm.schedule import parse
        >>> parse("all_reduce ranks=2 chunks=1\\nrank 0 | c0+1\\nrank 1 | c0+0").steps
        1
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
            transfers += _parse_cell(rank, step, cell.split())
    return Schedule(collective=collective, ranks=ranks, chunks=chunks, root=root, transfers=tuple(transfers))


def _parse_cell(rank: int, step: int, sends: list[str]) -> list[Transfer]:
    if sends == ["."]:
        return []
    transfers = []
    for text in sends:
        send = _SEND.fullmatch(text)
        if send is None:
            raise ScheduleError(
                f"rank {rank} step {step}: expected a send like 'c0+1' or 'c0=1,2', or '.', got {text!r}"
            )
        chunk, op, level = int(send[1]), _OPS[send[2]], int(send[4] or 0)
        transfers += [Transfer(step, rank, int(peer), chunk, op, level) for peer in send[3].split(",")]
    return transfers
