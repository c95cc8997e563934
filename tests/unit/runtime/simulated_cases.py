"""Cases of collectives over simulated ranks, and the results that they must have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.common.virtual_ranks import Operation, SimulatedOutcome, Simulation
from dtcomm.codecs import codec
from dtcomm.codecs.spec import CODECS as REGISTRY
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from dtcomm.schedule.ir import ROOTED
from tests.unit.algorithms.every_algorithm import NAMES, build

CASES = NAMES

SHARDS_IN = ("reduce_scatter", "scatter", "all_to_all")

SHARDS_OUT = ("all_gather", "gather", "all_to_all")

# One codec of each class of the registry, and options. Sums with `needs_agreement` have tests of their own.
CODECS = (
    *{
        entry.make: name for name, entry in reversed(REGISTRY.items()) if not codec(name).needs_agreement
    }.values(),
    "int8:round=stochastic,symmetric=false",
    "int8:scale=fp32,block=64",
    "int8:rotate=hadamard",
    "int4:block=128,round=stochastic,rotate=hadamard,spikes=1",
    "topk:ratio=0.2,values=int4,round=stochastic",
    "randk:ratio=0.05",
)


@dataclass
class Case:
    """One collective over fresh tensors on every rank."""

    operations: list[Operation]  # per rank
    inputs: list[list[torch.Tensor]]  # copies from before the call
    outputs: list[list[torch.Tensor | None]]
    residuals: list[list[torch.Tensor | None]]
    shape: OpSpec


def make_case(
    rng: random.Random,
    ranks: int,
    collective: str,
    algorithm: str,
    specs: list[str],
    numels: list[int],
    op: str = "sum",
    dtype: torch.dtype = torch.float32,
    feedback: bool = False,
    place: str = "slots",
    integers: bool = True,
) -> Case:
    root = rng.randrange(ranks) if collective in ROOTED else 0
    parts = tuple(TensorSpec(numel, dtype, codec(spec)) for numel, spec in zip(numels, specs, strict=True))
    shape = OpSpec(collective, op, parts, algorithm, root)
    schedule = build(algorithm, collective, ranks, root)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    case = Case([], [], [], [], shape)
    for rank in range(ranks):
        buffers, copies = [], []
        for numel in numels:
            count = numel * ranks if collective in SHARDS_IN else numel
            if integers:
                tensor = torch.randint(-8, 9, (count,), generator=generator).to(dtype)
            else:
                tensor = torch.randn(count, generator=generator).to(dtype)
            if collective in ("all_reduce", "broadcast", "reduce"):
                output = tensor
            else:
                size = numel * (ranks if collective in SHARDS_OUT else 1)
                output = torch.full((size,), torch.nan if dtype.is_floating_point else 77).to(dtype)
            if collective in ("reduce", "gather") and rank != root:
                output = None
            residual = torch.randn(count, generator=generator) * 0.01 if feedback else None
            absent = collective == "scatter" and rank != root
            buffers.append(Buffers(None if absent else tensor, output, None if absent else residual))
            copies.append(tensor.clone())
        case.inputs.append(copies)
        case.residuals.append([None if part.residual is None else part.residual.clone() for part in buffers])
        case.outputs.append([part.output for part in buffers])
        # Some of the ranks whose tensors are pulled have them in shared memory.
        shared = place == "shared" or (place == "pulled" and rng.random() < 0.3)
        operation = Operation(
            shape=shape,
            schedule=schedule,
            buffers=buffers,
            seed=7,
            shared=shared,
            single_copy=place == "pulled",
        )
        case.operations.append(operation)
    return case


def exact(case: Case, rank: int, part: int) -> torch.Tensor:
    """Return the result of the collective without rounding."""
    inputs = [torch.as_tensor(tensors[part]) for tensors in case.inputs]
    match case.shape.collective:
        case "broadcast":
            return inputs[case.shape.root]
        case "all_gather" | "gather":
            return torch.cat(inputs)
        case "scatter":
            return inputs[case.shape.root].view(len(inputs), -1)[rank]
        case "all_to_all":
            return torch.cat([tensor.view(len(inputs), -1)[rank] for tensor in inputs])
    stacked = torch.stack(inputs)
    if case.shape.op in ("min", "max"):
        total = stacked.amin(0) if case.shape.op == "min" else stacked.amax(0)
    else:
        total = stacked.sum(0).to(stacked.dtype)
    if case.shape.op == "avg":
        total = total / len(inputs)
    if case.shape.collective == "reduce_scatter":
        numel = case.shape.parts[part].numel
        return total[rank * numel : (rank + 1) * numel]
    return total


def calls_per_rank(cases: list[Case]) -> list[list[Operation]]:
    """Return the cases as one sequence of calls per rank."""
    return [[case.operations[rank] for case in cases] for rank in range(len(cases[0].operations))]


def require_finished(outcomes: list[SimulatedOutcome], world: Simulation) -> None:
    assert {outcome.status for outcome in outcomes} == {"done"}, (world, outcomes)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def worlds(count: int, salt: int) -> Iterator[tuple[Simulation, random.Random]]:
    for seed in range(count):
        rng = random.Random(salt * 100003 + seed)
        yield Simulation(ranks=rng.randint(2, 5), seed=seed, delay=rng.choice([0.0, 0.3, 0.7, 0.95])), rng
