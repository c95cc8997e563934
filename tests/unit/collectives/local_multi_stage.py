"""Multi-stage sums of all ranks in one thread: their stages run as operations of simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bench.common.virtual_ranks import Operation, SimulatedOutcome, Simulation, run_simulated
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.collectives._multi_stage import Check, MultiStagePlan, ReproducibleSum, SharedRandKSum
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from dtcomm.schedule import Schedule


class PreparedStage(NamedTuple):
    """The plan of a stage, as a runtime would prepare it."""

    spec: OpSpec
    schedule: Schedule


def stage_preparer(ranks: int, hosts: Sequence[int] | None) -> Callable[[OpSpec], PreparedStage]:
    """Return the function that `MultiStagePlan` calls to prepare a stage."""

    def prepare(request: OpSpec) -> PreparedStage:
        name = "two_shot" if request.algorithm == "direct" else request.algorithm
        if name.partition(":")[0] not in algorithms.available(request.collective):
            name = "one_shot"
        levels = hosts if name.startswith("hierarchical") else None
        schedule = algorithms.build(name, request.collective, ranks, request.root, hosts=levels)
        return PreparedStage(request._replace(algorithm=name), schedule)

    return prepare


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
    request = OpSpec(collective, op, parts, algorithm, root)
    prepare = stage_preparer(ranks, hosts)
    if spec.startswith("exact"):
        return ReproducibleSum(prepare, request, rank, ranks, audit=audit)
    return SharedRandKSum(prepare, request, rank, ranks)


def reduce_all(
    world: Simulation, plans: Sequence[MultiStagePlan], buffers: Sequence[Sequence[Buffers]], seed: int = 3
) -> tuple[list[SimulatedOutcome], list[Check | None]]:
    """Run one call on every rank; return the outcomes and the check that each rank calls afterwards."""
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
                    shape=stage.plan.spec,
                    schedule=stage.plan.schedule,
                    buffers=stage.buffers,
                    seed=seed,
                    hooks=stage.hooks,
                )
                for stage in stages
            ]
        )
    return run_simulated(world, calls), checks
