"""The native machines in seeded orders: thousands of interleavings, deaths, flips and disagreements, no
process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.runtime.local import Operation, Outcome, World, run
from dtcomm.runtime.shape import Part, Shape
from dtcomm.runtime.shm import Buffers

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
CASES = [(name, algorithm) for name in COLLECTIVES for algorithm in algorithms.available(name)]
CODECS = ("none", "fp16", "bf16", "int8", "int8:round=stochastic,symmetric=false", "int8:scale=fp32,block=64")


@dataclass
class Case:
    """One collective over fresh tensors on every rank."""

    operations: list[Operation]  # per rank
    inputs: list[list[torch.Tensor]]
    outputs: list[list[torch.Tensor | None]]
    residuals: list[list[torch.Tensor | None]]
    shape: Shape


def make(
    rng: random.Random,
    ranks: int,
    collective: str,
    algorithm: str,
    specs: list[str],
    numels: list[int],
    op: str = "sum",
    dtype: torch.dtype = torch.float32,
    feedback: bool = False,
    shared: bool = False,
    integers: bool = True,
) -> Case:
    root = rng.randrange(ranks) if collective == "broadcast" else 0
    parts = tuple(Part(numel, dtype, codec(spec)) for numel, spec in zip(numels, specs, strict=True))
    shape = Shape(collective, op, parts, algorithm, root)
    schedule = algorithms.build(algorithm, collective, ranks, root=root)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    case = Case([], [], [], [], shape)
    for _ in range(ranks):
        buffers = []
        for numel in numels:
            count = numel * ranks if collective == "reduce_scatter" else numel
            if integers:
                given = torch.randint(-8, 9, (count,), generator=generator).to(dtype)
            else:
                given = torch.randn(count, generator=generator).to(dtype)
            if collective in ("all_reduce", "broadcast"):
                output = given
            elif collective == "reduce_scatter":
                output = torch.full((numel,), torch.nan if dtype.is_floating_point else 77).to(dtype)
            else:
                output = torch.full((numel * ranks,), torch.nan if dtype.is_floating_point else 77).to(dtype)
            residual = torch.randn(count, generator=generator) * 0.01 if feedback else None
            buffers.append(Buffers(given, output, residual))
        case.inputs.append([part.input.clone() for part in buffers])
        case.residuals.append([None if part.residual is None else part.residual.clone() for part in buffers])
        case.outputs.append([part.output for part in buffers])
        operation = Operation(shape=shape, schedule=schedule, buffers=buffers, seed=7, shared=shared)
        case.operations.append(operation)
    return case


def exact(case: Case, rank: int, part: int) -> torch.Tensor:
    """What the collective means, where no bit is lost."""
    inputs = [torch.as_tensor(given[part]) for given in case.inputs]
    match case.shape.collective:
        case "broadcast":
            return inputs[case.shape.root]
        case "all_gather":
            return torch.cat(inputs)
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


def together(cases: list[Case]) -> list[list[Operation]]:
    """The cases as one sequence of calls per rank."""
    return [[case.operations[rank] for case in cases] for rank in range(len(cases[0].operations))]


def finished(outcomes: list[Outcome], world: World) -> None:
    assert {outcome.fate for outcome in outcomes} == {"done"}, (world, outcomes)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def worlds(count: int, salt: int) -> Iterator[tuple[World, random.Random]]:
    for seed in range(count):
        rng = random.Random(salt * 100003 + seed)
        yield World(ranks=rng.randint(2, 5), seed=seed, delay=rng.choice([0.0, 0.3, 0.7, 0.95])), rng


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_exact_in_every_order(collective: str, algorithm: str) -> None:
    """Sequences of operations give the exact result on all ranks, and count the bytes they promise."""
    for world, rng in worlds(60, salt=1):
        cases = []
        for _ in range(rng.randint(1, 4)):
            numels = [rng.choice([0, 1, 31, 1000, 4096, 9001]) for _ in range(rng.randint(1, 3))]
            specs = [rng.choice(["none", "fp16", "bf16"]) for _ in numels]
            shared = rng.random() < 0.5
            cases.append(make(rng, world.ranks, collective, algorithm, specs, numels, shared=shared))
        outcomes = run(world, together(cases))
        finished(outcomes, world)
        for case in cases:
            for rank in range(world.ranks):
                for part, output in enumerate(case.outputs[rank]):
                    assert output is not None
                    assert torch.equal(output, exact(case, rank, part)), (world, rank, case.shape)
        schedules = [(case.operations[0].schedule, case.shape) for case in cases]
        for rank, outcome in enumerate(outcomes):
            promised = 0
            for schedule, shape in schedules:
                for part in shape.parts:
                    scale = world.ranks if collective in ("reduce_scatter", "all_gather") else 1
                    promised += schedule.bytes_on_wire(part.numel * scale, part.codec)[rank]
            assert outcome.wire_bytes == promised, (world, rank)


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
@pytest.mark.parametrize("spec", CODECS)
def test_bits_do_not_depend_on_the_order(collective: str, algorithm: str, spec: str) -> None:
    """Every rank gets the same bits, and the same as without delays and in one piece."""
    for world, rng in worlds(25, salt=2):
        numel = rng.choice([1, 33, 2500, 7000])
        state = rng.getstate()
        case = make(rng, world.ranks, collective, algorithm, [spec], [numel], feedback=True, integers=False)
        rng.setstate(state)
        calm = make(rng, world.ranks, collective, algorithm, [spec], [numel], feedback=True, integers=False)
        finished(run(world, together([case])), world)
        plain = World(ranks=world.ranks, seed=0, delay=0.0, piece_bytes=64 * 1024, slot_bytes=2**20)
        finished(run(plain, together([calm])), plain)
        for rank in range(world.ranks):
            mine, theirs = case.operations[rank].buffers[0], calm.operations[rank].buffers[0]
            assert mine.output is not None and theirs.output is not None
            assert torch.equal(bits(mine.output), bits(theirs.output)), (world, rank)
            assert mine.residual is not None and theirs.residual is not None
            assert torch.equal(bits(mine.residual), bits(theirs.residual)), (world, rank)
            if collective != "reduce_scatter":
                first = case.operations[0].buffers[0].output
                assert first is not None and torch.equal(bits(mine.output), bits(first)), (world, rank)


@pytest.mark.parametrize("algorithm", algorithms.available("all_reduce"))
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("spec", CODECS)
def test_feedback_conserves_mass(algorithm: str, op: str, spec: str) -> None:
    """result (x ranks for avg) + new residuals = inputs + old residuals, over several calls with the same
    residual.
    """
    for world, rng in worlds(8, salt=3):
        case = make(
            rng, world.ranks, "all_reduce", algorithm, [spec], [3000], op=op, feedback=True, integers=False
        )
        for _ in range(3):
            owed = torch.zeros(3000, dtype=torch.float64)
            for operation in case.operations:
                part = operation.buffers[0]
                assert part.residual is not None
                part.input.copy_(torch.randn(3000))
                owed += part.input.double() + part.residual.double()
            finished(run(world, together([case])), world)
            result = case.operations[0].buffers[0].input.double()
            paid = result * (world.ranks if op == "avg" else 1)
            for operation in case.operations:
                residual = operation.buffers[0].residual
                assert residual is not None
                paid += residual.double()
            assert torch.allclose(paid, owed, atol=2e-5, rtol=0), (world, (paid - owed).abs().max())


def test_reduce_scatter_feedback_conserves_mass() -> None:
    for algorithm in algorithms.available("reduce_scatter"):
        for world, rng in worlds(20, salt=4):
            case = make(
                rng, world.ranks, "reduce_scatter", algorithm, ["int8"], [1500], feedback=True, integers=False
            )
            total = torch.zeros(1500 * world.ranks, dtype=torch.float64)
            for operation in case.operations:
                part = operation.buffers[0]
                assert part.residual is not None
                total += part.input.double() + part.residual.double()
            finished(run(world, together([case])), world)
            paid = torch.cat([torch.as_tensor(case.outputs[rank][0]) for rank in range(world.ranks)]).double()
            for operation in case.operations:
                residual = operation.buffers[0].residual
                assert residual is not None
                paid += residual.double()
            assert torch.allclose(paid, total, atol=2e-5, rtol=0), (algorithm, world)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
)
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_none_takes_other_dtypes(dtype: torch.dtype, op: str) -> None:
    if dtype is torch.bool and op == "sum":
        pytest.skip("a sum of bools is their or, tested with the kernels")
    for algorithm in algorithms.available("all_reduce"):
        for world, rng in worlds(6, salt=5):
            case = make(rng, world.ranks, "all_reduce", algorithm, ["none"], [2500], op=op, dtype=dtype)
            finished(run(world, together([case])), world)
            for rank in range(world.ranks):
                assert torch.equal(torch.as_tensor(case.outputs[rank][0]), exact(case, rank, 0)), (
                    world,
                    rank,
                )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_round_once_with_direct_algorithms(dtype: torch.dtype) -> None:
    """codec none on 16-bit tensors: one fp32 sum in rank order, rounded once."""
    for algorithm in ("one_shot", "two_shot"):
        for world, rng in worlds(20, salt=6):
            case = make(
                rng, world.ranks, "all_reduce", algorithm, ["none"], [2500], dtype=dtype, integers=False
            )
            finished(run(world, together([case])), world)
            total = case.inputs[0][0].float()
            for given in case.inputs[1:]:
                total = total + given[0].float()
            for rank in range(world.ranks):
                assert torch.equal(torch.as_tensor(case.outputs[rank][0]), total.to(dtype)), (
                    algorithm,
                    world,
                )


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_a_death_is_seen_and_nobody_hangs(collective: str, algorithm: str) -> None:
    """Whenever a rank dies, the others finish or say whom they waited for; nobody is stuck for another
    reason.
    """
    seen = set()
    for world, rng in worlds(120, salt=7):
        victim = rng.randrange(world.ranks)
        world = World(
            ranks=world.ranks, seed=world.seed, delay=world.delay, victim=victim, death=rng.randrange(40)
        )
        cases = [make(rng, world.ranks, collective, algorithm, ["int8"], [6000]) for _ in range(3)]
        outcomes = run(world, together(cases))
        for rank, outcome in enumerate(outcomes):
            seen.add(outcome.fate)
            if rank != victim:
                assert outcome.fate in ("done", "peer_lost"), (world, rank, outcome)
            if outcome.fate == "peer_lost":
                assert outcome.culprit != rank, (world, rank, outcome)
            else:
                assert outcome.fate == "died" or outcome.finished == 3, (world, rank, outcome)
    assert "peer_lost" in seen and "died" in seen


def test_a_flipped_bit_stays_where_it_fell() -> None:
    """Without checksums a flipped payload bit changes a result but no control flow, and no rank differs from another
    where they read the same payload."""
    changed = 0
    for world, rng in worlds(200, salt=8):
        world = World(ranks=world.ranks, seed=world.seed, delay=world.delay, flip=rng.randrange(12))
        case = make(rng, world.ranks, "all_reduce", "two_shot", ["int8"], [5000])
        finished(run(world, together([case])), world)
        outputs = [torch.as_tensor(case.outputs[rank][0]) for rank in range(world.ranks)]
        wrong = [not torch.equal(bits(output), bits(outputs[0])) for output in outputs]
        truth = exact(case, 0, 0)
        changed += any(bool((output - truth).abs().max() > 1.0) for output in outputs)
        # A bit flipped in a final box reaches every rank but its owner, who decoded before it was sent.
        assert sum(wrong) in (0, 1, world.ranks - 1), world
    assert changed > 20


ODD_CALLS: dict[str, tuple[str, str, list[str], list[int], str, torch.dtype]] = {
    "numel": ("all_reduce", "two_shot", ["int8"], [3001], "sum", torch.float32),
    "codec": ("all_reduce", "two_shot", ["fp16"], [3000], "sum", torch.float32),
    "op": ("all_reduce", "two_shot", ["int8"], [3000], "avg", torch.float32),
    "collective": ("reduce_scatter", "one_shot", ["int8"], [3000], "sum", torch.float32),
    "algorithm": ("all_reduce", "ring", ["int8"], [3000], "sum", torch.float32),
    "dtype": ("all_reduce", "two_shot", ["int8"], [3000], "sum", torch.bfloat16),
    "count": ("all_reduce", "two_shot", ["int8", "int8"], [1500, 1500], "sum", torch.float32),
}


@pytest.mark.parametrize("what", sorted(ODD_CALLS))
def test_disagreeing_ranks_find_out(what: str) -> None:
    """One rank calls something else: someone notices, nobody takes foreign bytes for its own, nobody hangs."""
    noticed = 0
    for world, rng in worlds(100, salt=9):
        usual = [make(rng, world.ranks, "all_reduce", "two_shot", ["int8"], [3000]) for _ in range(2)]
        collective, algorithm, specs, numels, op, dtype = ODD_CALLS[what]
        other = make(rng, world.ranks, collective, algorithm, specs, numels, op=op, dtype=dtype)
        odd = rng.randrange(world.ranks)
        operations = together(usual)
        operations[odd][1] = other.operations[odd]
        outcomes = run(world, operations)
        fates = {outcome.fate for outcome in outcomes}
        assert fates <= {"mismatch", "done"} and "mismatch" in fates, (world, outcomes)
        assert all(outcome.finished >= 1 for outcome in outcomes), (world, outcomes)
        noticed += sum(outcome.fate == "mismatch" for outcome in outcomes)
    assert noticed >= 100


def test_a_seed_reproduces() -> None:
    for world, rng in worlds(5, salt=10):
        state = rng.getstate()
        results = []
        for _ in range(2):
            rng.setstate(state)
            world = World(ranks=3, seed=world.seed, victim=1, death=9)
            cases = [make(rng, 3, "all_reduce", "ring", ["int8"], [9000]) for _ in range(2)]
            results.append(run(world, together(cases)))
        assert results[0] == results[1]
