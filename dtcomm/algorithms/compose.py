"""Operations that build a schedule from others: `sequence`, `reverse` and `remap`.

Chunks are independent of each other: each takes its own path through the ranks. Therefore a schedule over some of the
ranks becomes a part of a larger one once its ranks and chunks are renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dtcomm.schedule.ir import Op, Schedule, Transfer


def sequence(collective: str, first: Schedule, second: Schedule, root: int = 0) -> Schedule:
    """Return the schedule of ``collective`` that runs ``first`` and then ``second``, over the same ranks and chunks."""
    shifted = tuple(replace(t, step=t.step + first.steps) for t in second.transfers)
    return Schedule(
        collective=collective,
        ranks=first.ranks,
        chunks=first.chunks,
        root=root,
        transfers=first.transfers + shifted,
    )


def reverse(transfers: Sequence[Transfer], op: Op) -> Iterator[Transfer]:
    """Yield the transfers in the opposite direction and order, so that a broadcast's paths become a reduce's."""
    last = max((t.step for t in transfers), default=0)
    for t in transfers:
        yield replace(t, step=last - t.step, src=t.dst, dst=t.src, op=op)


def remap(
    schedule: Schedule,
    ranks: Sequence[int],
    chunks: Mapping[int, Iterable[int]],
    first_step: int = 0,
    level: int = 0,
) -> Iterator[Transfer]:
    """Yield the transfers of ``schedule`` as a part of a larger schedule.

    Rank i becomes ``ranks[i]``. Chunk j is repeated for each of ``chunks[j]``, and left out if j is missing. Step 0
    becomes ``first_step``.
    """
    for t in schedule.transfers:
        for chunk in chunks.get(t.chunk, ()):
            yield Transfer(first_step + t.step, ranks[t.src], ranks[t.dst], chunk, t.op, level)
