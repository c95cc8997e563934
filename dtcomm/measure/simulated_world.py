"""Simulated ranks in one thread: native interpreters stepped in a seeded order with delays, deaths and bit flips.

Nothing blocks or forks, so that thousands of interleavings run per second and a failing seed reproduces the failure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dtcomm import _C
from dtcomm.runtime.native.copy_policy import can_use_single_copy
from dtcomm.runtime.native.runtime import native_plan
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks, OpSpec
from dtcomm.schedule import Schedule

STATUSES = ("done", "died", "peer_lost", "mismatch", "stuck", "corrupt")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective of one rank.

    ``shared`` treats its tensor as shared memory; ``pulled`` lets peers read it in place (single copy); ``hooks``
    holds the local steps before and after.
    """

    shape: OpSpec
    schedule: Schedule
    buffers: Sequence[Buffers]
    seed: int = 0
    shared: bool = False
    pulled: bool = False
    hooks: OpHooks = NO_HOOKS


@dataclass(frozen=True, kw_only=True)
class World:
    """How the ranks are stepped.

    ``delay`` is the probability that a rank does not see a peer's next published payload yet. Rank ``victim`` dies
    after ``death`` steps. A bit is flipped in the ``flip``-th published payload. ``piece_bytes`` and ``slot_bytes`` are
    small, so that small tensors are cut into many pieces.
    """

    ranks: int
    seed: int
    delay: float = 0.5
    victim: int | None = None
    death: int = 0
    flip: int | None = None
    piece_bytes: int = 4096
    slot_bytes: int = field(default=64 * 1024)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended: one of ``STATUSES``, the rank it blames, completed operations and bytes sent."""

    status: str
    failed_rank: int
    finished: int
    wire_bytes: int


def run(world: World, operations: Sequence[Sequence[Operation]]) -> list[Outcome]:
    """Run ``operations[rank]`` in order on every rank; ranks run ahead of each other as far as the engine allows."""
    calls: list[list[Any]] = []
    for rank, mine in enumerate(operations):
        calls.append([])
        for operation in mine:
            shape, sizes = operation.shape, (world.piece_bytes, world.slot_bytes)
            plan = _plan(
                shape,
                operation.schedule,
                rank,
                *sizes,
                uses_single_copy=operation.pulled and can_use_single_copy(shape),
            )
            pointers = [buffers.pointers() for buffers in operation.buffers]
            calls[rank].append((plan, pointers, operation.seed, operation.shared, *operation.hooks.native()))
    outcomes = _C.run_simulated(
        ranks=world.ranks,
        seed=world.seed,
        max_boxes=max((plan.max_boxes for mine in calls for plan, *_ in mine), default=1),
        slot_bytes=world.slot_bytes,
        delay=world.delay,
        crash_rank=-1 if world.victim is None else world.victim,
        crash_after=world.death,
        flip_box=-1 if world.flip is None else world.flip,
        calls=calls,
    )
    return [
        Outcome(status=STATUSES[status], failed_rank=failed_rank, finished=finished, wire_bytes=wire_bytes)
        for status, failed_rank, finished, wire_bytes in outcomes
    ]


_plan = functools.lru_cache(maxsize=4096)(native_plan)
