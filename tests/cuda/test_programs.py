"""Lowered programs (ring, tree, one's own) by the fused kernels on a device: the engine's bytes, absent ranks."""

from __future__ import annotations

import os
import random

import pytest
import torch

import dtcomm.collectives as C
from dtcomm import _C
from dtcomm.codecs import codec
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure.virtual_ranks import Simulation, VirtualRanks, run_simulated
from dtcomm.runtime.cuda_peer.launch import CudaLauncher, FusedRanks, PeerBufferLayout
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from dtcomm.schedule.ir import REDUCING
from tests.cuda.device_cases import NEEDS_GPU, PEER_RUNTIME, on_cpu, on_device
from tests.unit.algorithms.every_algorithm import NAMES, build
from tests.unit.runtime.simulated_cases import make, together
from tests.unit.runtime.test_fused import SPECS, same

pytestmark = NEEDS_GPU


def there(each: Buffers) -> Buffers:
    """As ``on_device``, of ranks that may lack a tensor."""
    if each.input is None:
        return Buffers(None, None if each.output is None else each.output.cuda(), None)
    if each.output is None:
        given, _, residual = on_device(each._replace(output=each.input))
        return Buffers(given, None, residual)
    return on_device(each)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("spec", SPECS)
def test_every_algorithm_by_virtual_ranks(spec: str, ranks: int) -> None:
    """The larger tensor takes several pieces."""
    virtual = VirtualRanks(ranks, "cuda", box_bytes=2 * 2**20)
    for turn, (collective, algorithm) in enumerate(NAMES):
        for numel in (1, 5000, 300_000):
            turn += 1
            how = {
                "op": ("sum", "avg")[turn % 2] if collective in REDUCING else "sum",
                "dtype": (torch.float32, torch.bfloat16, torch.float16)[turn // 2 % 3],
                "feedback": turn // 3 % 2 == 0,
                "integers": False,
            }
            case = make(random.Random(turn), ranks, collective, algorithm, [spec], [numel], **how)
            theirs = [operation.buffers[0] for operation in case.operations]
            ours = [there(each) for each in theirs]
            plan = virtual.fused.prepare(case.shape, case.operations[0].schedule)
            virtual.fused.launch(plan, [[each] for each in ours])
            world = Simulation(ranks=ranks, seed=1, slot_bytes=2**20)
            assert {each.status for each in run_simulated(world, together([case]))} == {"done"}
            same([on_cpu(each) for each in ours], theirs)
    virtual.check()


def test_sanitizer_sized_programs() -> None:
    """Little enough for compute-sanitizer."""
    for collective, algorithm in (("all_reduce", "ring"), ("all_reduce", "tree"), ("all_to_all", "tree")):
        virtual = VirtualRanks(3, "cuda", blocks=2, box_bytes=2**20)
        case = make(random.Random(3), 3, collective, algorithm, ["int8"], [4000], feedback=True)
        ours = [there(operation.buffers[0]) for operation in case.operations]
        plan = virtual.fused.prepare(case.shape, case.operations[0].schedule)
        virtual.fused.launch(plan, [[each] for each in ours])
        virtual.check()


def test_a_rank_that_does_not_come_to_a_program_is_named() -> None:
    room = PeerBufferLayout(2, box_bytes=2**20)
    memory = [torch.zeros(_C.fused_bytes(2, room), dtype=torch.uint8, device="cuda") for _ in range(2)]
    pad = memory[0][_C.MISSING_OFFSET :][:4].view(torch.int32)
    addresses = [each.data_ptr() for each in memory]
    alone = FusedRanks(
        CudaLauncher(torch.device("cuda")), room, addresses, [pad], 0, 1, timeout_ns=50_000_000
    )
    x = torch.ones(5000, device="cuda")
    shape = OpSpec("all_reduce", "sum", (TensorSpec(5000, torch.float32, codec("int8")),), "ring")
    alone.launch(alone.prepare(shape, build("ring", "all_reduce", 2)), [[Buffers(x, x)]])
    assert int(pad) == 2


def own_schedules(rank: int, world_size: int) -> dict[str, object]:
    wrong = []
    for collective, algorithm in (("all_reduce", "tree"), ("all_reduce", "ring"), ("broadcast", "ring")):
        schedule = build(algorithm, collective, world_size)
        here = torch.randn(20_000, generator=torch.Generator().manual_seed(rank))
        there = here.cuda()
        os.environ["DTCOMM_RUNTIME"] = "auto"
        C.run(schedule, here, codec="int8")
        os.environ["DTCOMM_RUNTIME"] = "peer"
        C.run(schedule, there, codec="int8")
        if not torch.equal(here, there.cpu()):
            wrong.append((collective, algorithm))
    whole = torch.full((7,), rank, device="cuda")  # of a type that is only moved
    C.broadcast(whole, 1)
    info = next(iter(C.info()["devices"].values()))
    return {"wrong": wrong, "broadcast": whole.tolist(), "elsewhere": info["elsewhere"]}


def test_own_schedules_of_processes_that_share_a_device() -> None:
    for said in run_ranks(own_schedules, 2, env=PEER_RUNTIME, timeout=120):
        assert said["wrong"] == [] and said["broadcast"] == [1] * 7 and said["elsewhere"] == {}
