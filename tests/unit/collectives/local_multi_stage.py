"""Sums on common ground with all ranks in one thread: their stages as operations of runtime/local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.collectives._multi_stage import Check, Message, MultiStagePlan
from dtcomm.collectives._reproducible_sum import ExactSum
from dtcomm.collectives._shared_randk_sum import SharedSum
from dtcomm.measure.simulated_world import Operation, Outcome, World, run
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from dtcomm.schedule import Schedule


class Prepared(NamedTuple):
    """What a runtime would make of a message."""

    shape: OpSpec
    schedule: Schedule


def maker(ranks: int, hosts: Sequence[int] | None) -> Callable[[Message], Prepared]:
    def make(message: Message) -> Prepared:
        name = "two_shot" if message.algorithm == "direct" else message.algorithm
        if name.partition(":")[0] not in algorithms.available(message.collective):
            name = "one_shot"
        levels = hosts if name.startswith("hierarchical") else None
        schedule = algorithms.build(name, message.collective, ranks, message.root, hosts=levels)
        shape = OpSpec(
            message.collective, message.op, message.parts, name, message.root, (), False, message.purpose
        )
        return Prepared(shape, schedule)

    return make


def plan_of(
    spec: str,
    numels: Sequence[int],
    dtype: torch.dtype,
    *,
    rank: int,
    ranks: int,
    collective: str = "all_reduce",
    op: str = "sum",
    algorithm: str = "two_shot",
    root: int = 0,
    audit: bool = False,
    hosts: Sequence[int] | None = None,
) -> MultiStagePlan:
    parts = tuple(TensorSpec(numel, dtype, codec(spec)) for numel in numels)
    message = Message(collective, op, parts, algorithm, root, "")
    make = maker(ranks, hosts)
    if spec.startswith("exact"):
        return ExactSum(make, message, rank, ranks, audit=audit)
    return SharedSum(make, message, rank, ranks)


def reduce_all(
    world: World, plans: Sequence[MultiStagePlan], buffers: Sequence[Sequence[Buffers]], seed: int = 3
) -> tuple[list[Outcome], list[Check | None]]:
    """One call on every rank; returns how they ended, and what each is to call then."""
    calls: list[list[Operation]] = []
    checks: list[Check | None] = []
    memories = [[torch.empty(0, dtype=torch.uint8)] for _ in plans]
    for plan, parts, memory in zip(plans, buffers, memories, strict=True):

        def scratch(size: int, memory: list[torch.Tensor] = memory) -> torch.Tensor:
            memory[0] = torch.full((size,), 0xA5, dtype=torch.uint8)
            return memory[0]

        stages, check = plan.stages(parts, seed, scratch)
        checks.append(check)
        calls.append(
            [
                Operation(
                    shape=stage.plan.shape,
                    schedule=stage.plan.schedule,
                    buffers=stage.buffers,
                    seed=seed,
                    hooks=stage.hooks,
                )
                for stage in stages
            ]
        )
    return run(world, calls), checks
