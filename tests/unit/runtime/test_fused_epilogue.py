"""What follows a sum by the fused kernels, in the emulator: the engine's bytes; the sums of tensor parallelism, too."""

from __future__ import annotations

import threading

import pytest
import torch

from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    custom_schedule,
    gather_ops,
    reduce_ops,
    reduce_scatter,
)
from dtcomm.collectives import run as run_schedule
from dtcomm.kernels.epilogue import epilogue_task
from dtcomm.measure.virtual_ranks import Operation, Simulation, VirtualRanks, run_simulated
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.cuda_peer.launch import ALGORITHMS, FusedEpilogue, NoFusedKernel
from dtcomm.runtime.cuda_peer.runtime import PeerRuntime
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, Buffers, OpHooks, OpSpec, TensorSpec
from dtcomm.tp.comm_config import CommConfig
from dtcomm.tp.emulate import emulate_all_reduce
from dtcomm.tp.flash_all_reduce import Epilogue, Norm, flash_all_reduce
from tests.support.op_recorder import not_recording
from tests.support.stream_checker import RecordedStreams
from tests.unit.runtime.test_fused import SPECS
from tests.unit.runtime.test_peer import JudgedPeers

ROWS, FEATURES = 17, 150
TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Given:
    """The tensors of every rank; the same whenever asked for."""

    def __init__(self, ranks: int, dtype: torch.dtype) -> None:
        dice = torch.Generator().manual_seed(ranks)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=dice).to(dtype)

        self.bias, self.weight = random(FEATURES), random(FEATURES)
        self.sums = [random(ROWS, FEATURES) for _ in range(ranks)]
        self.residuals = [random(ROWS, FEATURES) for _ in range(ranks)]
        self.normed = [torch.zeros(ROWS, FEATURES, dtype=dtype) for _ in range(ranks)]

    def task(self, rank: int, parts: tuple[str, ...] = ("bias", "residual", "norm")) -> OpHooks:
        step = epilogue_task(
            self.sums[rank],
            bias=self.bias if "bias" in parts else None,
            residual=self.residuals[rank] if "residual" in parts else None,
            weight=self.weight if "norm" in parts else None,
            norm_out=self.normed[rank] if "norm" in parts else None,
            eps=1e-5,
        )
        return OpHooks(after=(step,))


def by_the_engine(
    given: Given, algorithm: str, spec: str, parts: tuple[str, ...] = ("bias", "residual", "norm")
) -> None:
    """One call, in place."""
    ranks = len(given.sums)
    part = TensorSpec(ROWS * FEATURES, given.bias.dtype, codec(spec))
    shape = OpSpec("all_reduce", "avg", (part,), algorithm)
    schedule = algorithms.build(algorithm, "all_reduce", ranks)
    operations = [
        [Operation(shape=shape, schedule=schedule, buffers=[Buffers(x, x)], hooks=given.task(rank, parts))]
        for rank, x in enumerate(given.sums)
    ]
    assert {each.status for each in run_simulated(Simulation(ranks=ranks, seed=1), operations)} == {"done"}


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_kernels_add_what_the_engine_adds(algorithm: str, ranks: int) -> None:
    virtual = VirtualRanks(ranks, slot_bytes=4096)
    for turn, spec in enumerate(SPECS):
        dtype = TYPES[turn % 3]
        parts = (("bias",), ("residual",), ("bias", "residual"))[(turn + ranks) % 3]
        ours, theirs = Given(ranks, dtype), Given(ranks, dtype)
        plan = virtual.plan("all_reduce", ROWS * FEATURES, dtype, spec, algorithm=algorithm, op="avg")
        after = [
            FusedEpilogue(ours.bias if "bias" in parts else None, each if "residual" in parts else None)
            for each in ours.residuals
        ]
        virtual.run(plan, ours.sums, ours.sums, epilogues=after)
        by_the_engine(theirs, algorithm, spec, parts)
        same(ours.sums, theirs.sums)
    virtual.check()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_sum_of_tensor_parallelism_is_one_kernel(ranks: int) -> None:
    virtual = VirtualRanks(ranks)
    for turn, spec in enumerate(SPECS[1:]):
        given = Given(ranks, TYPES[turn % 3])
        expected = emulate_all_reduce(given.sums, spec, TWO_SHOT_SYMMETRIC)
        plan = virtual.plan(
            "all_reduce", ROWS * FEATURES, TYPES[turn % 3], spec, algorithm=TWO_SHOT_SYMMETRIC
        )
        virtual.run(plan, given.sums, given.sums)
        same(given.sums, [expected] * ranks)
    virtual.check()


def peers(ranks: int, given: Given, algorithm: str, spec: str, way: str) -> list[str]:
    """Every rank by a runtime of its own; the faults of their streams."""
    dtype = given.bias.dtype
    shape = OpSpec("all_reduce", "avg", (TensorSpec(ROWS * FEATURES, dtype, codec(spec)),), algorithm)

    def work(rank: int, runtime: PeerRuntime, streams: RecordedStreams) -> None:
        x = given.sums[rank]
        with not_recording():
            hooks = given.task(rank)
            streams.own(x, given.residuals[rank], given.normed[rank])
        plan = runtime.make_plan(shape, algorithms.build(algorithm, "all_reduce", ranks))
        buffers = [Buffers(x, x)]
        if way == "run":
            runtime.run(plan, buffers, 1, hooks)
        else:
            runtime.submit(plan, buffers, [x], 1, hooks).wait()
        given.normed[rank].mul_(1)  # the caller's stream may use it now

    return JudgedPeers(ranks).run(work)


@pytest.mark.parametrize("way", ["run", "submit"])
@pytest.mark.parametrize("algorithm", algorithms.available("all_reduce"))
def test_what_follows_in_the_peer_runtime(algorithm: str, way: str) -> None:
    """In the kernel of a direct sum, behind a program's, and behind what the group's backend does (fp8_e5m2)."""
    for dtype, spec in ((torch.bfloat16, "int8"), (torch.float32, "none"), (torch.float32, "fp8_e5m2")):
        ours, theirs = Given(3, dtype), Given(3, dtype)
        assert peers(3, ours, algorithm, spec, way) == []
        by_the_engine(theirs, algorithm, spec)
        same([*ours.sums, *ours.normed], [*theirs.sums, *theirs.normed])


def communicator_of(rank: int, ranks: int, runtime: PeerRuntime) -> Communicator:
    """As much of one as calls need."""
    made = object.__new__(Communicator)
    made.device, made.runtime, made.checksum = None, runtime, False
    made.rank, made.size, made.ranks = rank, ranks, list(range(ranks))
    made.groups, made.tuning_table, made.calls, made.plans = (tuple(made.ranks),), "", 0, {}
    return made


def test_calls_and_layers_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """``all_reduce(epilogue=…)`` and the two-step sum, from the callers' functions down, on threads."""
    ranks, dtype = 3, torch.bfloat16
    here = threading.local()
    for module in (reduce_ops, gather_ops):
        monkeypatch.setattr(module, "get_communicator_for", lambda *_: here.communicator)
    monkeypatch.setattr(custom_schedule, "get_communicator", lambda _: here.communicator)
    ours, theirs = [Given(ranks, dtype) for _ in range(2)], Given(ranks, dtype)
    results: dict[int, object] = {}

    def work(rank: int, runtime: PeerRuntime, _: RecordedStreams) -> None:
        here.communicator = communicator_of(rank, ranks, runtime)
        with not_recording():
            hooks = ours[0].task(rank)
        all_reduce(ours[0].sums[rank], "avg", codec="int4", algorithm="two_shot", epilogue=hooks.after[0])
        over = CommConfig(codec=codec("int8"), backward_codec=codec("none"), algorithm=TWO_SHOT_SYMMETRIC)
        after = Epilogue(ours[1].bias, ours[1].residuals[rank], Norm(ours[1].weight, 1e-5))
        results[rank] = flash_all_reduce(ours[1].sums[rank], over, after)
        # A schedule of one's own, and algorithms by name; whole numbers, so that sums are exact.
        mine = torch.arange(900.0) + rank
        run_schedule(algorithms.build("tree", "all_reduce", ranks), mine)
        part, whole = torch.zeros(300), torch.zeros(900)
        reduce_scatter(part, mine, algorithm="ring")
        all_gather(whole, part, algorithm="halving")
        broadcast(part, 1, algorithm="tree")
        with not_recording():
            assert torch.equal(whole, 9 * torch.arange(900.0) + 9) and torch.equal(part, whole[300:600])
        assert runtime.info()["operations"] == 6 and runtime.info()["elsewhere"] == {}
        assert not reduce_ops.supports_two_shot_symmetric(ours[1].sums[rank], codec("mxfp4"))

    assert JudgedPeers(ranks).run(work) == []
    by_the_engine(theirs, "two_shot", "int4")
    same([*ours[0].sums, *ours[0].normed], [*theirs.sums, *theirs.normed])
    for rank in range(ranks):
        expected = by_verbs(Given(ranks, dtype), "int8", rank)
        same(list(results[rank]), list(expected))


def by_verbs(given: Given, spec: str, rank: int) -> list[torch.Tensor]:
    """The two-step sum of the fp32 terms, what follows it rounded once, and the norm of that."""
    total = emulate_all_reduce([each.float() for each in given.sums], spec, TWO_SHOT_SYMMETRIC)
    y = ((total + given.bias.float()) + given.residuals[rank].float()).to(given.bias.dtype)
    normed = torch.empty_like(y)
    epilogue_task(y, weight=given.weight, eps=1e-5, norm_out=normed)()
    return [y, normed]


def test_no_schedule_replaces_the_symmetric_two_shot_sum() -> None:
    def work(rank: int, runtime: PeerRuntime, _: RecordedStreams) -> None:
        shape = OpSpec(
            "all_reduce", "sum", (TensorSpec(9, torch.float32, codec("topk:ratio=0.1")),), TWO_SHOT_SYMMETRIC
        )
        with pytest.raises(NoFusedKernel, match="topk"):
            runtime.make_plan(shape, algorithms.build("two_shot", "all_reduce", 2))

    JudgedPeers(2).run(work)
    assert TWO_SHOT_SYMMETRIC in ALGORITHMS and TWO_SHOT_SYMMETRIC not in algorithms.available("all_reduce")
