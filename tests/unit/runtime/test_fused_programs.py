"""Lowered programs by the fused kernels, virtual ranks in the emulator: every algorithm, with the engine's bytes."""

from __future__ import annotations

import random

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.errors import PeerLost
from dtcomm.measure.virtual_ranks import Operation, Simulation, VirtualRanks, run_simulated
from dtcomm.runtime.cuda_peer import launch
from dtcomm.runtime.cuda_peer.launch import NoFusedKernel, why_not
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from dtcomm.schedule import Schedule, Transfer, verify
from dtcomm.schedule.ir import REDUCING
from tests.unit.algorithms.every_algorithm import NAMES, build
from tests.unit.runtime.simulated_cases import Case, calls_per_rank, make_case, require_finished
from tests.unit.runtime.test_fused import SPECS, same


def compare_with_engine(virtual: VirtualRanks, fused: Case, reference: Case) -> None:
    """Run a case by the kernels and its copy by the engine, and compare the results."""
    plan = virtual.fused.prepare(fused.shape, fused.operations[0].schedule)
    virtual.fused.launch(plan, [operation.buffers for operation in fused.operations])
    world = Simulation(ranks=virtual.ranks, seed=1)
    outcomes = run_simulated(world, calls_per_rank([reference]))
    require_finished(outcomes, world)
    assert plan.sent_bytes == outcomes[0].wire_bytes
    for left, right in zip(fused.operations, reference.operations, strict=True):
        same(list(left.buffers), list(right.buffers))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("spec", SPECS)
def test_every_algorithm_matches_engine_bytes(spec: str, ranks: int) -> None:
    loading, pushing = (
        VirtualRanks(ranks, box_bytes=2**19, seed=ranks, pushes=pushes) for pushes in (False, True)
    )
    for turn, (collective, algorithm) in enumerate(NAMES):
        # Sizes, types, options and where payloads lie take turns.
        turn += ranks + SPECS.index(spec)
        virtual = pushing if turn // 6 % 2 else loading
        options = {
            "op": ("sum", "avg")[turn % 2] if collective in REDUCING else "sum",
            "dtype": (torch.float32, torch.bfloat16, torch.float16)[turn // 2 % 3],
            "feedback": turn // 3 % 2 == 0,
            "integers": False,
        }
        numels = [(1, 1500, 2100)[turn % 3]]
        pair = [
            make_case(random.Random(turn), ranks, collective, algorithm, [spec], numels, **options)
            for _ in "ab"
        ]
        compare_with_engine(virtual, *pair)
    loading.check()
    pushing.check()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("spec", ["none", "int8", "int4:block=128,spikes=1"])
def test_pushed_programs_match_engine_bytes(spec: str, ranks: int) -> None:
    virtual = VirtualRanks(ranks, seed=ranks, pushes=True)
    for turn, (collective, algorithm) in enumerate(NAMES):
        options = {"integers": False, "feedback": turn % 2 == 0}
        numels = [(1, 2100)[turn % 2]]
        pair = [
            make_case(random.Random(turn), ranks, collective, algorithm, [spec], numels, **options)
            for _ in "ab"
        ]
        compare_with_engine(virtual, *pair)
    virtual.check()


@pytest.mark.parametrize("pushes", [False, True])
def test_tensor_larger_than_memory_is_cut_into_pieces(pushes: bool) -> None:
    """The memory holds two granules of each chunk at a time; then it is too small for any."""
    ranks, spec = 3, "int8"
    uncut = VirtualRanks(ranks, pushes=pushes)
    for algorithm in ("ring", "tree"):
        boxes = 4 * codec(spec).wire_bytes(1024) * (2 if pushes else 1) + (
            4 * 1024 if algorithm == "tree" else 0
        )
        cut = VirtualRanks(ranks, box_bytes=2 * boxes, pushes=pushes)
        pair = [
            make_case(random.Random(1), ranks, "all_reduce", algorithm, [spec], [16_000], feedback=True)
            for _ in "ab"
        ]
        compare_with_engine(cut, *pair)
        another_pair = [
            make_case(random.Random(1), ranks, "all_reduce", algorithm, [spec], [16_000], feedback=True)
            for _ in "ab"
        ]
        compare_with_engine(uncut, *another_pair)
        cut.check()
    with pytest.raises(NoFusedKernel, match="box_bytes must be"):
        VirtualRanks(ranks, box_bytes=1024, pushes=pushes).plan(
            "all_reduce", 9, torch.float32, spec, algorithm="ring"
        )


def test_messages_of_several_tensors() -> None:
    specs, numels = ["int8", "none", "int4", "int8"], [2000, 0, 1, 1500]
    virtual = VirtualRanks(4)
    for algorithm in ("ring", "halving", "two_shot"):
        pair = [
            make_case(random.Random(5), 4, "all_reduce", algorithm, specs, numels, "avg", feedback=True)
            for _ in "ab"
        ]
        compare_with_engine(virtual, *pair)
    virtual.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int64, torch.bool], ids=str)
def test_copying_collectives_accept_any_dtype(dtype: torch.dtype) -> None:
    virtual = VirtualRanks(3)
    for collective, algorithm in NAMES:
        if collective not in REDUCING:
            pair = [
                make_case(random.Random(2), 3, collective, algorithm, ["none"], [1111], dtype=dtype)
                for _ in "ab"
            ]
            compare_with_engine(virtual, *pair)
    virtual.check()


def test_unequal_splits_of_a_program() -> None:
    ranks, sizes = 3, [[5, 0, 1100], [7, 2, 0], [0, 0, 0]]
    splits = tuple(size for row in sizes for size in row)
    for spec in ("int8", "none"):
        virtual = VirtualRanks(ranks)
        shape = OpSpec(
            "all_to_all", "sum", (TensorSpec(max(splits), torch.float32, codec(spec)),), "tree", splits=splits
        )
        schedule = build("tree", "all_to_all", ranks)
        inputs = [torch.randn(sum(row)) for row in sizes]
        fused, reference = (
            [Buffers(x, torch.zeros(sum(row[rank] for row in sizes))) for rank, x in enumerate(inputs)]
            for _ in range(2)
        )
        virtual.fused.launch(virtual.fused.prepare(shape, schedule), [[buffer] for buffer in fused])
        operations = [[Operation(shape=shape, schedule=schedule, buffers=[buffer])] for buffer in reference]
        assert {buffer.status for buffer in run_simulated(Simulation(ranks=ranks, seed=1), operations)} == {
            "done"
        }
        same(fused, reference)
        virtual.check()


def two_step_schedule(ranks: int, chunks: int) -> Schedule:
    """A custom schedule: every chunk goes to its owner and back in two steps, which have many tasks per owner."""
    transfers = []
    for chunk in range(chunks):
        owner = chunk % 2
        peers = [rank for rank in range(ranks) if rank != owner]
        transfers += [Transfer(0, rank, owner, chunk, "reduce") for rank in peers]
        transfers += [Transfer(1, owner, rank, chunk, "copy") for rank in peers]
    schedule = Schedule(
        collective="all_reduce", ranks=ranks, chunks=chunks, root=0, transfers=tuple(transfers)
    )
    verify(schedule)
    return schedule


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("chunks", [16, 17, 33, 70])
def test_step_with_more_tasks_than_one_launch_takes(chunks: int, pushes: bool) -> None:
    ranks, numel = 3, 1024 * chunks - 5
    virtual, schedule = VirtualRanks(ranks, box_bytes=2**19, pushes=pushes), two_step_schedule(ranks, chunks)
    shape = OpSpec("all_reduce", "sum", (TensorSpec(numel, torch.float32, codec("int8")),), "my own")
    fused, reference = (
        [
            Buffers(x := torch.randn(numel, generator=torch.Generator().manual_seed(rank)), x)
            for rank in range(ranks)
        ]
        for _ in range(2)
    )
    virtual.fused.launch(virtual.fused.prepare(shape, schedule), [[buffer] for buffer in fused])
    world = Simulation(ranks=ranks, seed=1, slot_bytes=2**20)
    operations = [[Operation(shape=shape, schedule=schedule, buffers=[buffer])] for buffer in reference]
    assert {buffer.status for buffer in run_simulated(world, operations)} == {"done"}
    same(fused, reference)
    virtual.check()


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving"])
def test_absent_rank_of_emulated_program_is_named(algorithm: str, pushes: bool) -> None:
    for absent in range(4):
        virtual = VirtualRanks(4, absent=absent, pushes=pushes)
        virtual.all_reduce([torch.ones(3000) for _ in range(4)], codec="int8", algorithm=algorithm)
        missing = {int(pad) for rank, pad in enumerate(virtual.fused.pads) if rank != absent}
        assert missing == {1 + absent}
        with pytest.raises(PeerLost, match=f"rank {absent} did not arrive in time"):
            virtual.check()


def test_reason_when_no_program_exists() -> None:
    two_hosts = build("hierarchical", "all_reduce", 4, hosts=(2, 2))
    parts = (TensorSpec(9, torch.float32, codec("none"), codec("int4")),)
    shape = OpSpec("all_reduce", "sum", parts, "hierarchical")
    assert "inside one host" in why_not(shape, 4, two_hosts)
    assert why_not(shape, 4, build("hierarchical", "all_reduce", 4, hosts=(4,))) == ""
    assert "two_shot_symmetric has no fused kernel of reduce" in why_not(
        shape._replace(collective="reduce", algorithm="two_shot_symmetric"), 4, two_hosts
    )
    sent = shape._replace(
        collective="broadcast", algorithm="send", parts=(TensorSpec(9, torch.float32, codec("int8")),)
    )
    assert "send has no fused kernel" in why_not(sent, 2, build("one_shot", "broadcast", 2))
    assert "int32" in why_not(
        shape._replace(parts=(TensorSpec(9, torch.int32, codec("none")),)), 4, two_hosts
    )


def test_programs_without_a_place_for_a_payload_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native plan checks the inboxes itself; a schedule that cannot be pushed is named."""
    plan_inboxes = launch.plan_inboxes
    monkeypatch.setattr(launch, "plan_inboxes", lambda programs: ((), *plan_inboxes(programs)[1:]))
    virtual = VirtualRanks(2, pushes=True)
    refusal = "ring cannot be pushed: rank 1 step 0 chunk 0: payload 0 of rank 1 has no place in the inbox of rank 0"
    with pytest.raises(NoFusedKernel, match=refusal):
        virtual.plan("all_reduce", 9, torch.float32, "int8", algorithm="ring")
    monkeypatch.setattr(launch, "verify_inboxes", lambda *_: None)
    with pytest.raises(
        NoFusedKernel, match="inboxes: payload 0 of rank 1 has no place in the inbox of rank 0"
    ):
        virtual.plan("all_reduce", 9, torch.float32, "int8", algorithm="ring")
