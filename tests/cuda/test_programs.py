"""Lowered programs (ring, tree, custom) run by the fused kernels on a device: the engine's bytes, absent ranks."""

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
from tests.unit.runtime.simulated_cases import calls_per_rank, make_case
from tests.unit.runtime.test_fused import SPECS, same

pytestmark = NEEDS_GPU


def to_gpu(buffers: Buffers) -> Buffers:
    """As ``on_device``, for ranks that may lack an input or an output."""
    if buffers.input is None:
        return Buffers(None, None if buffers.output is None else buffers.output.cuda(), None)
    if buffers.output is None:
        source, _, residual = on_device(buffers._replace(output=buffers.input))
        return Buffers(source, None, residual)
    return on_device(buffers)


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("spec", SPECS)
def test_programs_of_every_algorithm_match_engine(spec: str, ranks: int, pushes: bool) -> None:
    """The larger tensor takes several pieces."""
    virtual = VirtualRanks(ranks, "cuda", box_bytes=2 * 2**20, pushes=pushes)
    for turn, (collective, algorithm) in enumerate(NAMES):
        for numel in (1, 5000, 300_000):
            turn += 1
            options = {
                "op": ("sum", "avg")[turn % 2] if collective in REDUCING else "sum",
                "dtype": (torch.float32, torch.bfloat16, torch.float16)[turn // 2 % 3],
                "feedback": turn // 3 % 2 == 0,
                "integers": False,
            }
            case = make_case(random.Random(turn), ranks, collective, algorithm, [spec], [numel], **options)
            reference = [operation.buffers[0] for operation in case.operations]
            fused = [to_gpu(buffers) for buffers in reference]
            plan = virtual.fused.prepare(case.shape, case.operations[0].schedule)
            virtual.fused.launch(plan, [[buffers] for buffers in fused])
            world = Simulation(ranks=ranks, seed=1, slot_bytes=2**20)
            assert {outcome.status for outcome in run_simulated(world, calls_per_rank([case]))} == {"done"}
            same([on_cpu(buffers) for buffers in fused], reference)
    virtual.check()


def test_sanitizer_sized_programs() -> None:
    """Small enough for compute-sanitizer."""
    for turn, (collective, algorithm) in enumerate(
        (("all_reduce", "ring"), ("all_reduce", "tree"), ("all_to_all", "tree"), ("all_reduce", "ring"))
    ):
        virtual = VirtualRanks(3, "cuda", blocks=2, box_bytes=2**20, pushes=turn > 1)
        case = make_case(random.Random(3), 3, collective, algorithm, ["int8"], [4000], feedback=True)
        fused = [to_gpu(operation.buffers[0]) for operation in case.operations]
        plan = virtual.fused.prepare(case.shape, case.operations[0].schedule)
        virtual.fused.launch(plan, [[buffers] for buffers in fused])
        virtual.check()


def test_absent_rank_of_a_program_is_named() -> None:
    layout = PeerBufferLayout(2, box_bytes=2**20)
    memory = [torch.zeros(_C.fused_bytes(2, layout), dtype=torch.uint8, device="cuda") for _ in range(2)]
    pad = memory[0][_C.MISSING_OFFSET :][:4].view(torch.int32)
    addresses = [tensor.data_ptr() for tensor in memory]
    first_rank = FusedRanks(
        CudaLauncher(torch.device("cuda")), layout, addresses, [pad], 0, 1, timeout_ns=50_000_000
    )
    x = torch.ones(5000, device="cuda")
    shape = OpSpec("all_reduce", "sum", (TensorSpec(5000, torch.float32, codec("int8")),), "ring")
    first_rank.launch(first_rank.prepare(shape, build("ring", "all_reduce", 2)), [[Buffers(x, x)]])
    assert int(pad) == 2


def compare_custom_schedules_with_cpu(rank: int, world_size: int) -> dict[str, object]:
    wrong = []
    for collective, algorithm in (("all_reduce", "tree"), ("all_reduce", "ring"), ("broadcast", "ring")):
        schedule = build(algorithm, collective, world_size)
        on_cpu = torch.randn(20_000, generator=torch.Generator().manual_seed(rank))
        on_gpu = on_cpu.cuda()
        os.environ["DTCOMM_RUNTIME"] = "auto"
        C.run(schedule, on_cpu, codec="int8")
        os.environ["DTCOMM_RUNTIME"] = "peer"
        C.run(schedule, on_gpu, codec="int8")
        if not torch.equal(on_cpu, on_gpu.cpu()):
            wrong.append((collective, algorithm))
    whole = torch.full((7,), rank, device="cuda")  # an integer type: copied, not summed
    C.broadcast(whole, 1)
    info = next(iter(C.info()["devices"].values()))
    return {
        "wrong": wrong,
        "broadcast": whole.tolist(),
        "elsewhere": info["elsewhere"],
        "pushes": info["pushes"],
    }


@pytest.mark.parametrize("push", ["on", "off"])
def test_custom_schedules_between_processes_match_cpu_bits(push: str) -> None:
    environment = {**PEER_RUNTIME, "DTCOMM_PUSH": push}
    for report in run_ranks(compare_custom_schedules_with_cpu, 2, env=environment, timeout=120):
        assert report["pushes"] is (push == "on")
        assert report["wrong"] == [] and report["broadcast"] == [1] * 7 and report["elsewhere"] == {}
