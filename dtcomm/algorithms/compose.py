"""Schedules made of schedules."""

from __future__ import annotations

from dataclasses import replace

from dtcomm.schedule.ir import Schedule


def then(collective: str, first: Schedule, second: Schedule) -> Schedule:
    """``collective`` as ``first`` and, step after step, ``second`` over the same ranks and chunks."""
    later = tuple(replace(t, step=t.step + first.steps) for t in second.transfers)
    return Schedule(
        collective=collective, ranks=first.ranks, chunks=first.chunks, transfers=first.transfers + later
    )
