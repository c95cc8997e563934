"""Schedules made of schedules.

Chunks do not know of each other: each travels its own way through the ranks. So a schedule over some of the ranks
is a part of a larger one once its ranks and chunks are named anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dtcomm.schedule.ir import Op, Schedule, Transfer


def then(collective: str, first: Schedule, second: Schedule, root: int = 0) -> Schedule:
    """``collective`` as ``first`` and, step after step, ``second`` over the same ranks and chunks."""
    later = tuple(replace(t, step=t.step + first.steps) for t in second.transfers)
    return Schedule(
        collective=collective,
        ranks=first.ranks,
        chunks=first.chunks,
        root=root,
        transfers=first.transfers + later,
    )


def backwards(transfers: Sequence[Transfer], op: Op) -> Iterator[Transfer]:
    """The same ways in the other direction, last step first: what handed copies out now brings sums in."""
    last = max((t.step for t in transfers), default=0)
    for t in transfers:
        yield replace(t, step=last - t.step, src=t.dst, dst=t.src, op=op)


def embed(
    schedule: Schedule,
    ranks: Sequence[int],
    chunks: Mapping[int, Iterable[int]],
    first: int = 0,
    level: int = 0,
) -> Iterator[Transfer]:
    """``schedule``'s transfers with its rank i called ``ranks[i]``, its chunk j repeated for all of ``chunks[j]``
    (none where j is missing), from step ``first`` on.
    """
    for t in schedule.transfers:
        for chunk in chunks.get(t.chunk, ()):
            yield Transfer(first + t.step, ranks[t.src], ranks[t.dst], chunk, t.op, level)
