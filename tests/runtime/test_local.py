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
from dtcomm.schedule.ir import CUT_AT_GRANULES, ROOTED
from tests.algorithms.cases import NAMES, build

CASES = NAMES
SHARDS_IN = ("reduce_scatter", "scatter", "all_to_all")
SHARDS_OUT = ("all_gather", "gather", "all_to_all")
CODECS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8:round=stochastic,symmetric=false",
    "int8:scale=fp32,block=64",
    "fp8_e4m3",
    "int8:rotate=hadamard",
    "int4:block=128,round=stochastic,rotate=hadamard,spikes=1",
    "mxfp4",
    "sign",
    "topk:ratio=0.01",
    "topk:ratio=0.2,values=int4,round=stochastic",
    "randk:ratio=0.05",
)


@dataclass
class Case:
    """One collective over fresh tensors on every rank."""

    operations: list[Operation]  # per rank
    inputs: list[list[torch.Tensor]]  # as they were
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
    place: str = "slots",
    integers: bool = True,
) -> Case:
    root = rng.randrange(ranks) if collective in ROOTED else 0
    parts = tuple(Part(numel, dtype, codec(spec)) for numel, spec in zip(numels, specs, strict=True))
    shape = Shape(collective, op, parts, algorithm, root)
    schedule = build(algorithm, collective, ranks, root)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    case = Case([], [], [], [], shape)
    for rank in range(ranks):
        buffers, kept = [], []
        for numel in numels:
            count = numel * ranks if collective in SHARDS_IN else numel
            if integers:
                given = torch.randint(-8, 9, (count,), generator=generator).to(dtype)
            else:
                given = torch.randn(count, generator=generator).to(dtype)
            if collective in ("all_reduce", "broadcast", "reduce"):
                output = given
            else:
                size = numel * (ranks if collective in SHARDS_OUT else 1)
                output = torch.full((size,), torch.nan if dtype.is_floating_point else 77).to(dtype)
            if collective in ("reduce", "gather") and rank != root:
                output = None
            residual = torch.randn(count, generator=generator) * 0.01 if feedback else None
            absent = collective == "scatter" and rank != root
            buffers.append(Buffers(None if absent else given, output, None if absent else residual))
            kept.append(given.clone())
        case.inputs.append(kept)
        case.residuals.append([None if part.residual is None else part.residual.clone() for part in buffers])
        case.outputs.append([part.output for part in buffers])
        # Of the ranks whose tensors are pulled some have theirs in shared memory.
        shared = place == "shared" or (place == "pulled" and rng.random() < 0.3)
        operation = Operation(
            shape=shape, schedule=schedule, buffers=buffers, seed=7, shared=shared, pulled=place == "pulled"
        )
        case.operations.append(operation)
    return case


def exact(case: Case, rank: int, part: int) -> torch.Tensor:
    """What the collective means, where no bit is lost."""
    inputs = [torch.as_tensor(given[part]) for given in case.inputs]
    match case.shape.collective:
        case "broadcast":
            return inputs[case.shape.root]
        case "all_gather" | "gather":
            return torch.cat(inputs)
        case "scatter":
            return inputs[case.shape.root].view(len(inputs), -1)[rank]
        case "all_to_all":
            return torch.cat([given.view(len(inputs), -1)[rank] for given in inputs])
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
    for world, rng in worlds(40, salt=1):
        cases = []
        for _ in range(rng.randint(1, 4)):
            numels = [rng.choice([0, 1, 31, 1000, 4096, 9001]) for _ in range(rng.randint(1, 3))]
            specs = [rng.choice(["none", "fp16", "bf16"]) for _ in numels]
            place = rng.choice(["slots", "shared", "pulled"])
            cases.append(make(rng, world.ranks, collective, algorithm, specs, numels, place=place))
        outcomes = run(world, together(cases))
        finished(outcomes, world)
        for case in cases:
            for rank in range(world.ranks):
                for part, output in enumerate(case.outputs[rank]):
                    if not case.operations[0].schedule.ends(rank, rank):
                        assert output is None
                        given = case.operations[rank].buffers[part].input
                        assert given is not None and torch.equal(given, case.inputs[rank][part])
                        continue
                    assert output is not None
                    assert torch.equal(output, exact(case, rank, part)), (world, rank, case.shape)
        schedules = [(case.operations[0].schedule, case.shape) for case in cases]
        for rank, outcome in enumerate(outcomes):
            promised = 0
            for schedule, shape in schedules:
                for part in shape.parts:
                    scale = 1 if collective in CUT_AT_GRANULES else world.ranks
                    promised += schedule.bytes_on_wire(part.numel * scale, part.codec)[rank]
            assert outcome.wire_bytes == promised, (world, rank)


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
@pytest.mark.parametrize("spec", CODECS)
def test_bits_do_not_depend_on_the_order(collective: str, algorithm: str, spec: str) -> None:
    """Every rank gets the same bits, and the same as without delays and in one piece."""
    for world, rng in worlds(12, salt=2):
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
            if mine.output is not None and theirs.output is not None:
                assert torch.equal(bits(mine.output), bits(theirs.output)), (world, rank)
            if mine.residual is not None and theirs.residual is not None:
                assert torch.equal(bits(mine.residual), bits(theirs.residual)), (world, rank)
            if collective in ("all_reduce", "all_gather", "broadcast"):
                assert mine.output is not None
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
                assert part.residual is not None and part.input is not None
                part.input.copy_(torch.randn(3000))
                owed += part.input.double() + part.residual.double()
            finished(run(world, together([case])), world)
            result = torch.as_tensor(case.operations[0].buffers[0].input).double()
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
                assert part.residual is not None and part.input is not None
                total += part.input.double() + part.residual.double()
            finished(run(world, together([case])), world)
            paid = torch.cat([torch.as_tensor(case.outputs[rank][0]) for rank in range(world.ranks)]).double()
            for operation in case.operations:
                residual = operation.buffers[0].residual
                assert residual is not None
                paid += residual.double()
            assert torch.allclose(paid, total, atol=2e-5, rtol=0), (algorithm, world)


@pytest.mark.parametrize("algorithm", algorithms.available("reduce"))
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_reduce_feedback_conserves_mass(algorithm: str, op: str) -> None:
    """What the root ends with and what all ranks keep is what they put in, wherever it was encoded."""
    for world, rng in worlds(20, salt=11):
        case = make(
            rng, world.ranks, "reduce", algorithm, ["int8"], [3000], op=op, feedback=True, integers=False
        )
        owed = torch.zeros(3000, dtype=torch.float64)
        for rank, operation in enumerate(case.operations):
            residual = operation.buffers[0].residual
            assert residual is not None
            owed += case.inputs[rank][0].double() + residual.double()
        finished(run(world, together([case])), world)
        root = case.shape.root
        paid = torch.as_tensor(case.outputs[root][0]).double() * (world.ranks if op == "avg" else 1)
        for operation in case.operations:
            residual = operation.buffers[0].residual
            assert residual is not None
            paid += residual.double()
        assert torch.allclose(paid, owed, atol=2e-5, rtol=0), (world, (paid - owed).abs().max())


@pytest.mark.parametrize("collective", ["gather", "scatter", "all_to_all", "all_gather", "broadcast"])
def test_copies_feedback_conserves_mass(collective: str) -> None:
    """A receiver's copy and what its sender keeps are what the sender put in; what stays at home is exact."""
    for algorithm in algorithms.available(collective):
        for world, rng in worlds(12, salt=12):
            n, root = world.ranks, 0
            case = make(rng, n, collective, algorithm, ["int8"], [1500], feedback=True, integers=False)
            before = [[part.residual for part in operation.buffers] for operation in case.operations]
            kept = [None if part[0] is None else part[0].clone() for part in before]
            finished(run(world, together([case])), world)
            root = case.shape.root
            outputs = [part[0] for part in case.outputs]
            for rank in range(n):
                old, new = kept[rank], case.operations[rank].buffers[0].residual
                if old is None or new is None or (collective == "broadcast" and rank != root):
                    continue
                owed = case.inputs[rank][0] + old
                match collective:
                    case "gather":
                        arrived = torch.as_tensor(outputs[root]).view(n, -1)[rank]
                    case "all_gather":
                        arrived = torch.as_tensor(outputs[(rank + 1) % n]).view(n, -1)[rank]
                    case "broadcast":
                        arrived = torch.as_tensor(outputs[(rank + 1) % n])
                    case "scatter":
                        arrived = torch.cat([torch.as_tensor(output) for output in outputs])
                    case _:
                        rows = [torch.as_tensor(output).view(n, -1)[rank] for output in outputs]
                        arrived = torch.cat(rows)
                assert torch.allclose(arrived + new, owed, atol=1e-5, rtol=0), (algorithm, world, rank)


def test_unequal_splits() -> None:
    """Every pair of ranks has a size of its own, nothing at all included; the codec's grid starts at each."""
    for world, rng in worlds(150, salt=13):
        n = world.ranks
        spec = rng.choice(["none", "int8", "fp16", "int8:round=stochastic"])
        sizes = [[rng.choice([0, 1, 700, 2048, 5000]) for _ in range(n)] for _ in range(n)]
        splits = tuple(size for row in sizes for size in row)
        part = Part(max(splits), torch.float32, codec(spec))
        shape = Shape("all_to_all", "sum", (part,), rng.choice(["one_shot", "tree"]), 0, splits)
        schedule = algorithms.build(shape.algorithm, "all_to_all", n)
        given = [torch.randn(sum(row)) for row in sizes]
        taken = [torch.full((sum(row[rank] for row in sizes),), torch.nan) for rank in range(n)]
        calls = [
            [
                Operation(
                    shape=shape,
                    schedule=schedule,
                    buffers=[Buffers(given[r], taken[r])],
                    seed=3,
                    pulled=world.seed % 3 == 0,
                )
            ]
            * 2
            for r in range(n)
        ]
        outcomes = run(world, calls)
        finished(outcomes, world)
        for rank in range(n):
            rows = taken[rank].split([row[rank] for row in sizes])
            for src, row in enumerate(rows):
                want = given[src].split(sizes[src])[rank]
                worst = want.abs().max().item() if want.numel() else 0.0
                loss = 0.0 if src == rank else {"none": 0.0, "fp16": 2e-3}.get(spec, 0.02) * worst
                assert (row - want).abs().max().item() <= loss if want.numel() else True, (world, src, rank)
        if shape.algorithm == "one_shot":
            sent = [
                sum(part.codec.wire_bytes(s) for i, s in enumerate(row) if i != r)
                for r, row in enumerate(sizes)
            ]
            assert [outcome.wire_bytes for outcome in outcomes] == [2 * bytes for bytes in sent]


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
    for world, rng in worlds(60, salt=7):
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
