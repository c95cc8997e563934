"""Epilogues of sums by the fused kernels, in the emulator: the engine's bytes; the sums of tensor parallelism, too."""

from __future__ import annotations

import threading

import pytest
import torch

from bench.common.virtual_ranks import VirtualRanks
from dtcomm import _C, algorithms
from dtcomm.codecs import codec
from dtcomm.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    custom_schedule,
    gather_ops,
    groups,
    reduce_ops,
    reduce_scatter,
)
from dtcomm.collectives import run as run_schedule
from dtcomm.kernels.epilogue import epilogue_task
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.cuda_peer import PeerRuntime
from dtcomm.runtime.cuda_peer.launch import ALGORITHMS, FusedEpilogue, NoFusedKernel
from dtcomm.runtime.plans import PlanCache
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, Buffers, OpSpec, TensorSpec
from dtcomm.tp.comm_config import CommConfig
from dtcomm.tp.flash_all_reduce import Epilogue, Norm, flash_all_reduce
from tests.support.op_recorder import not_recording
from tests.support.stream_checker import RecordedStreams
from tests.unit.runtime.fused_epilogue_cases import (
    FEATURES,
    ROWS,
    TYPES,
    RankTensors,
    run_by_engine,
    same,
    symmetric_sum,
)
from tests.unit.runtime.test_fused import SPECS
from tests.unit.runtime.test_peer import CheckedPeers


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_fused_epilogue_of_virtual_ranks_matches_engine(algorithm: str, ranks: int) -> None:
    virtual = VirtualRanks(ranks, slot_bytes=4096)
    for turn, spec in enumerate(SPECS):
        dtype = TYPES[turn % 3]
        parts = (("bias",), ("addend",), ("bias", "addend"))[(turn + ranks) % 3]
        fused, reference = RankTensors(ranks, dtype), RankTensors(ranks, dtype)
        plan = virtual.plan("all_reduce", ROWS * FEATURES, dtype, spec, algorithm=algorithm, op="avg")
        after = [
            FusedEpilogue(fused.bias if "bias" in parts else None, residual if "addend" in parts else None)
            for residual in fused.residuals
        ]
        virtual.run(plan, fused.sums, fused.sums, epilogues=after)
        run_by_engine(reference, algorithm, spec, parts)
        same(fused.sums, reference.sums)
    virtual.check()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_symmetric_two_shot_sum_matches_reference(ranks: int) -> None:
    virtual = VirtualRanks(ranks)
    for turn, spec in enumerate(SPECS[1:]):
        tensors = RankTensors(ranks, TYPES[turn % 3])
        expected = symmetric_sum(tensors.sums, spec)
        plan = virtual.plan(
            "all_reduce", ROWS * FEATURES, TYPES[turn % 3], spec, algorithm=TWO_SHOT_SYMMETRIC
        )
        virtual.run(plan, tensors.sums, tensors.sums)
        same(tensors.sums, [expected] * ranks)
    virtual.check()


def run_on_peers(ranks: int, tensors: RankTensors, algorithm: str, spec: str, call: str) -> list[str]:
    """Run one call of ranks that are threads with a runtime each; return the faults of their streams."""
    dtype = tensors.bias.dtype
    shape = OpSpec("all_reduce", "avg", (TensorSpec(ROWS * FEATURES, dtype, codec(spec)),), algorithm)

    def work(rank: int, runtime: PeerRuntime, streams: RecordedStreams) -> None:
        x = tensors.sums[rank]
        with not_recording():
            hooks = tensors.task(rank)
            streams.own(x, tensors.residuals[rank], tensors.normed[rank])
        plan = runtime.make_plan(shape, algorithms.build(algorithm, "all_reduce", ranks))
        buffers = [Buffers(x, x)]
        if call == "run":
            runtime.run(plan, buffers, 1, hooks)
        else:
            runtime.submit(plan, buffers, [x], 1, hooks).wait()
        tensors.normed[rank].mul_(1)  # valid: the caller's stream is ordered after the call

    return CheckedPeers(ranks).run(work)


@pytest.mark.parametrize("call", ["run", "submit"])
@pytest.mark.parametrize("algorithm", algorithms.available("all_reduce"))
def test_epilogue_in_peer_runtime_matches_engine(algorithm: str, call: str) -> None:
    """In the kernel of a direct sum, and after a sum by the group's backend (other algorithms, fp8_e5m2)."""
    for dtype, spec in ((torch.bfloat16, "int8"), (torch.float32, "none"), (torch.float32, "fp8_e5m2")):
        fused, reference = RankTensors(3, dtype), RankTensors(3, dtype)
        assert run_on_peers(3, fused, algorithm, spec, call) == []
        run_by_engine(reference, algorithm, spec)
        same([*fused.sums, *fused.normed], [*reference.sums, *reference.normed])


def communicator_of(rank: int, ranks: int, runtime: PeerRuntime) -> Communicator:
    """Return a communicator with the attributes that calls read."""
    communicator = object.__new__(Communicator)
    communicator.device, communicator.runtime, communicator.checksum = None, runtime, False
    communicator.rank, communicator.size, communicator.ranks = rank, ranks, list(range(ranks))
    communicator.groups = (tuple(communicator.ranks),)
    communicator.tuning_table = communicator.links = ""
    communicator.counter, communicator.plans, communicator.connection = _C.CallCounter(), PlanCache(), None
    return communicator


def test_collective_calls_and_layers_use_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """``all_reduce(epilogue=…)`` and the two-step sum, from the callers' functions down, on threads."""
    ranks, dtype = 3, torch.bfloat16
    of_thread = threading.local()
    for module in (reduce_ops, gather_ops, groups):
        monkeypatch.setattr(module, "get_communicator_for", lambda *_: of_thread.communicator)
    monkeypatch.setattr(custom_schedule, "get_communicator", lambda _: of_thread.communicator)
    fused, reference = [RankTensors(ranks, dtype) for _ in range(2)], RankTensors(ranks, dtype)
    results: dict[int, object] = {}

    def work(rank: int, runtime: PeerRuntime, _: RecordedStreams) -> None:
        of_thread.communicator = communicator_of(rank, ranks, runtime)
        with not_recording():
            hooks = fused[0].task(rank)
        all_reduce(fused[0].sums[rank], "avg", codec="int4", algorithm="two_shot", epilogue=hooks.after[0])
        over = CommConfig(codec=codec("int8"), backward_codec=codec("none"), algorithm=TWO_SHOT_SYMMETRIC)
        after = Epilogue(fused[1].bias, fused[1].residuals[rank], Norm(fused[1].weight, 1e-5))
        results[rank] = flash_all_reduce(fused[1].sums[rank], over, after)
        # A custom schedule and other algorithms, which the group's backend runs; integers, so that sums are exact.
        tensor = torch.arange(900.0) + rank
        run_schedule(algorithms.build("tree", "all_reduce", ranks), tensor)
        part, whole = torch.zeros(300), torch.zeros(900)
        reduce_scatter(part, tensor, algorithm="ring")
        all_gather(whole, part, algorithm="halving")
        broadcast(part, 1, algorithm="tree")
        with not_recording():
            assert torch.equal(whole, 9 * torch.arange(900.0) + 9) and torch.equal(part, whole[300:600])
        elsewhere = runtime.info()["elsewhere"]
        assert runtime.info()["operations"] == 6 and sum(elsewhere.values()) == 4
        assert all("has no fused kernel of" in reason for reason in elsewhere)
        assert not groups.supports_two_shot_symmetric(fused[1].sums[rank], codec("mxfp4"))

    assert CheckedPeers(ranks).run(work) == []
    run_by_engine(reference, "two_shot", "int4")
    same([*fused[0].sums, *fused[0].normed], [*reference.sums, *reference.normed])
    for rank in range(ranks):
        expected = two_step_sum(RankTensors(ranks, dtype), "int8", rank)
        same(list(results[rank]), list(expected))


def two_step_sum(tensors: RankTensors, spec: str, rank: int) -> list[torch.Tensor]:
    """The two-step sum of the fp32 terms with its epilogue rounded once, and the norm of that."""
    total = symmetric_sum([term.float() for term in tensors.sums], spec)
    y = ((total + tensors.bias.float()) + tensors.residuals[rank].float()).to(tensors.bias.dtype)
    normed = torch.empty_like(y)
    epilogue_task(y, weight=tensors.weight, eps=1e-5, norm_out=normed)()
    return [y, normed]


def test_no_schedule_replaces_the_symmetric_two_shot_sum() -> None:
    def work(rank: int, runtime: PeerRuntime, _: RecordedStreams) -> None:
        shape = OpSpec(
            "all_reduce", "sum", (TensorSpec(9, torch.float32, codec("topk:ratio=0.1")),), TWO_SHOT_SYMMETRIC
        )
        with pytest.raises(NoFusedKernel, match="topk"):
            runtime.make_plan(shape, algorithms.build("two_shot", "all_reduce", 2))

    CheckedPeers(2).run(work)
    assert TWO_SHOT_SYMMETRIC in ALGORITHMS and TWO_SHOT_SYMMETRIC not in algorithms.available("all_reduce")
