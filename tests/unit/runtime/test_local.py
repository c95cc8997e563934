"""The native machines in seeded orders, in one process: results, bits and sent bytes in many interleavings."""

from __future__ import annotations

import pytest
import torch

from bench.common.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm import _C, algorithms
from dtcomm.codecs import codec
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from dtcomm.schedule import Schedule, Transfer
from dtcomm.schedule.ir import CUT_AT_GRANULES
from tests.unit.runtime.simulated_cases import (
    CASES,
    CODECS,
    bits,
    calls_per_rank,
    exact,
    make_case,
    require_finished,
    worlds,
)


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_results_are_exact_in_every_order(collective: str, algorithm: str) -> None:
    """Sequences of operations give the exact result on all ranks, and count the bytes they promise."""
    for world, rng in worlds(20, salt=1):
        cases = []
        for _ in range(rng.randint(1, 4)):
            numels = [rng.choice([0, 1, 31, 1000, 4096, 9001]) for _ in range(rng.randint(1, 3))]
            specs = [rng.choice(["none", "fp16", "bf16"]) for _ in numels]
            place = rng.choice(["slots", "shared", "pulled"])
            cases.append(make_case(rng, world.ranks, collective, algorithm, specs, numels, place=place))
        outcomes = run_simulated(world, calls_per_rank(cases))
        require_finished(outcomes, world)
        for case in cases:
            for rank in range(world.ranks):
                for part, output in enumerate(case.outputs[rank]):
                    if not case.operations[0].schedule.ends(rank, rank):
                        assert output is None
                        source = case.operations[rank].buffers[part].input
                        assert source is not None and torch.equal(source, case.inputs[rank][part])
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
    for world, rng in worlds(2, salt=2):
        numel = rng.choice([1, 33, 2500, 7000])
        state = rng.getstate()
        case = make_case(
            rng, world.ranks, collective, algorithm, [spec], [numel], feedback=True, integers=False
        )
        rng.setstate(state)
        calm = make_case(
            rng, world.ranks, collective, algorithm, [spec], [numel], feedback=True, integers=False
        )
        require_finished(run_simulated(world, calls_per_rank([case])), world)
        plain = Simulation(ranks=world.ranks, seed=0, delay=0.0, piece_bytes=64 * 1024, slot_bytes=2**20)
        require_finished(run_simulated(plain, calls_per_rank([calm])), plain)
        for rank in range(world.ranks):
            left, right = case.operations[rank].buffers[0], calm.operations[rank].buffers[0]
            if left.output is not None and right.output is not None:
                assert torch.equal(bits(left.output), bits(right.output)), (world, rank)
            if left.residual is not None and right.residual is not None:
                assert torch.equal(bits(left.residual), bits(right.residual)), (world, rank)
            if collective in ("all_reduce", "all_gather", "broadcast"):
                assert left.output is not None
                first = case.operations[0].buffers[0].output
                assert first is not None and torch.equal(bits(left.output), bits(first)), (world, rank)


def test_unequal_splits() -> None:
    """Every pair of ranks has its own size, zero included; the codec's grid starts anew at each."""
    for world, rng in worlds(150, salt=13):
        n = world.ranks
        spec = rng.choice(["none", "int8", "fp16", "int8:round=stochastic"])
        sizes = [[rng.choice([0, 1, 700, 2048, 5000]) for _ in range(n)] for _ in range(n)]
        splits = tuple(size for row in sizes for size in row)
        part = TensorSpec(max(splits), torch.float32, codec(spec))
        shape = OpSpec("all_to_all", "sum", (part,), rng.choice(["one_shot", "tree"]), 0, splits)
        schedule = algorithms.build(shape.algorithm, "all_to_all", n)
        generator = torch.Generator().manual_seed(world.seed)
        source = [torch.randn(sum(row), generator=generator) for row in sizes]
        target = [torch.full((sum(row[rank] for row in sizes),), torch.nan) for rank in range(n)]
        calls = [
            [
                Operation(
                    shape=shape,
                    schedule=schedule,
                    buffers=[Buffers(source[r], target[r])],
                    seed=3,
                    single_copy=world.seed % 3 == 0,
                )
            ]
            * 2
            for r in range(n)
        ]
        outcomes = run_simulated(world, calls)
        require_finished(outcomes, world)
        for rank in range(n):
            rows = target[rank].split([row[rank] for row in sizes])
            for src, row in enumerate(rows):
                want = source[src].split(sizes[src])[rank]
                worst = want.abs().max().item() if want.numel() else 0.0
                loss = 0.0 if src == rank else {"none": 0.0, "fp16": 2e-3}.get(spec, 0.02) * worst
                if spec == "fp16" and src != rank:
                    loss += 2.0**-24  # of numbers below fp16's normal ones
                error = (row - want).abs().max().item() if want.numel() else 0.0
                assert error <= loss, (world, src, rank, spec, sizes, error, loss)
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
def test_codec_none_reduces_other_dtypes(dtype: torch.dtype, op: str) -> None:
    if dtype is torch.bool and op == "sum":
        pytest.skip("a sum of bools is their or, tested with the kernels")
    for algorithm in algorithms.available("all_reduce"):
        for world, rng in worlds(6, salt=5):
            case = make_case(rng, world.ranks, "all_reduce", algorithm, ["none"], [2500], op=op, dtype=dtype)
            require_finished(run_simulated(world, calls_per_rank([case])), world)
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
            case = make_case(
                rng, world.ranks, "all_reduce", algorithm, ["none"], [2500], dtype=dtype, integers=False
            )
            require_finished(run_simulated(world, calls_per_rank([case])), world)
            total = case.inputs[0][0].float()
            for source in case.inputs[1:]:
                total = total + source[0].float()
            for rank in range(world.ranks):
                assert torch.equal(torch.as_tensor(case.outputs[rank][0]), total.to(dtype)), (
                    algorithm,
                    world,
                )


def test_seed_reproduces_a_simulation() -> None:
    for world, rng in worlds(5, salt=10):
        state = rng.getstate()
        results = []
        for _ in range(2):
            rng.setstate(state)
            world = Simulation(ranks=3, seed=world.seed, crash_rank=1, crash_after=9)
            cases = [make_case(rng, 3, "all_reduce", "ring", ["int8"], [9000]) for _ in range(2)]
            results.append(run_simulated(world, calls_per_rank(cases)))
        assert results[0] == results[1]


def message(root: int, numel: int, rank: int, offers: bool) -> Operation:
    """One rank's part of a message from ``root`` to the other one of two ranks, which single copy is planned for."""
    schedule = Schedule(
        collective="broadcast",
        ranks=2,
        chunks=1,
        root=root,
        transfers=(Transfer(0, root, 1 - root, 0, "copy"),),
    )
    shape = OpSpec("broadcast", "sum", (TensorSpec(numel, torch.float32, codec("none")),), "send", root)
    sends = rank == root
    tensor = torch.arange(numel, dtype=torch.float32) + 1 if sends else torch.full((numel,), torch.nan)
    return Operation(
        shape=shape,
        schedule=schedule,
        buffers=[Buffers(tensor if sends else None, None if sends else tensor)],
        single_copy=True,
        variants=_C.Variants(piece_bytes=4096, single_copy=True, offers=offers),
    )


def test_offers_are_taken_or_withdrawn_and_messages_arrive_in_every_order() -> None:
    for world, rng in worlds(200, salt=31):
        simulation = Simulation(ranks=2, seed=world.seed, delay=world.delay)
        numels = [rng.choice([1, 300, 5000, 8192]) for _ in range(6)]
        roots = [rng.randrange(2) for _ in numels]
        calls = [
            [message(root, numel, rank, True) for root, numel in zip(roots, numels, strict=True)]
            for rank in range(2)
        ]
        require_finished(run_simulated(simulation, calls), simulation)
        for index, (root, numel) in enumerate(zip(roots, numels, strict=True)):
            output = calls[1 - root][index].buffers[0].output
            assert output is not None and torch.equal(output, torch.arange(numel, dtype=torch.float32) + 1), (
                world
            )


@pytest.mark.parametrize(("offers", "finished"), [(True, 2), (False, 0)])
def test_a_sender_that_offers_does_not_need_the_receiver(offers: bool, finished: int) -> None:
    simulation = Simulation(ranks=2, seed=3, crash_rank=1, crash_after=0)
    calls = [[message(0, 4096, rank, offers) for _ in range(2)] for rank in range(2)]
    sender, receiver = run_simulated(simulation, calls)
    assert (sender.finished, receiver.status) == (finished, "died")


def test_ranks_adopt_variants_alike_in_every_order() -> None:
    """Ranks that run ahead of rank 0 wait for its decisions, pieces of any size give the same sums, and trials end."""
    for world, rng in worlds(12, salt=29):
        n = world.ranks
        part = TensorSpec(rng.choice([1500, 6000]), torch.float32, codec(rng.choice(["none", "int8"])))
        shape = OpSpec("all_reduce", "sum", (part,), rng.choice(["one_shot", "two_shot", "ring"]))
        schedule = algorithms.build(shape.algorithm, "all_reduce", n)
        variants = _C.Variants(
            piece_bytes=4096,
            size_class="all_reduce",
            piece_sizes=[4096, 8192, 16384],
            tries_stream_payload=True,
            tries_stream_output=True,
        )
        calls: list[list[Operation]] = [[] for _ in range(n)]
        for _ in range(240):
            for rank in range(n):
                tensor = torch.full((part.numel,), rank + 1.0)
                operation = Operation(
                    shape=shape, schedule=schedule, buffers=[Buffers(tensor, tensor)], variants=variants
                )
                calls[rank].append(operation)
        outcomes = run_simulated(world, calls)
        require_finished(outcomes, world)
        # Two stages: 4 kinds of stores in 4 rounds of 4 operations, 3 sizes in 5.
        for outcome in outcomes:
            (choice,) = outcome.choices
            (first,) = outcomes[0].choices
            assert choice["settled"] and choice["trials"] == 4 * 4 * 4 + 3 * 5 * 4, world
            assert {**choice, "microseconds": 0} == {**first, "microseconds": 0}, world
        want = calls[0][0].buffers[0].output
        assert want is not None and (want - n * (n + 1) / 2).abs().max() < 0.1
        for rank_calls in calls:
            for operation in rank_calls:
                output = operation.buffers[0].output
                assert output is not None and torch.equal(output, want), world


def test_trials_choose_what_takes_the_fewest_steps() -> None:
    """The clock counts steps, and smaller pieces take more of them: the choice is that of the largest pieces."""
    part = TensorSpec(16 * 1024, torch.float32, codec("none"))
    shape = OpSpec("all_reduce", "sum", (part,), "two_shot")
    schedule = algorithms.build("two_shot", "all_reduce", 2)
    variants = _C.Variants(piece_bytes=4096, size_class="all_reduce", piece_sizes=[4096, 32768])
    calls: list[list[Operation]] = [[], []]
    for _ in range(100):
        for rank_calls in calls:
            tensor = torch.ones(part.numel)
            rank_calls.append(
                Operation(
                    shape=shape, schedule=schedule, buffers=[Buffers(tensor, tensor)], variants=variants
                )
            )
    for seed in range(5):
        for outcome in run_simulated(Simulation(ranks=2, seed=seed), calls):
            (choice,) = outcome.choices
            assert (choice["settled"], choice["piece_bytes"]) == (True, 32768), seed
