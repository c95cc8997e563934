"""Fused kernels of virtual ranks on a device: the engine's bytes, graphs, an absent rank."""

from __future__ import annotations

import pytest
import torch

from bench.common.virtual_ranks import VirtualRanks
from dtcomm import _C
from dtcomm.codecs import codec
from dtcomm.runtime.cuda_peer.launch import COLLECTIVES, CudaLauncher, FusedRanks, PeerBufferLayout
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from tests.cuda.device_cases import NEEDS_GPU, on_cpu, on_device
from tests.unit.runtime.test_fused import DIRECT, SPECS, run_by_engine, same, tensors

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("collective", list(COLLECTIVES))
def test_virtual_ranks_match_engine(collective: str, dtype: torch.dtype, ranks: int) -> None:
    virtual = VirtualRanks(ranks, "cuda")
    for algorithm in DIRECT[collective]:
        for spec in SPECS:
            for numel, feedback in ((1, False), (5000, True), (300_000, False)):
                part = TensorSpec(numel, dtype, codec(spec))
                op = "avg" if feedback and collective in ("all_reduce", "reduce_scatter") else "sum"
                shape = OpSpec(collective, op, (part,), algorithm)
                plan = virtual.fused.prepare(shape)
                reference = tensors(collective, ranks, numel, dtype, feedback)
                fused = [on_device(buffers) for buffers in reference]
                virtual.fused.launch(plan, [[buffers] for buffers in fused])
                run_by_engine(shape, ranks, reference)
                same([on_cpu(buffers) for buffers in fused], reference)
    virtual.check()


def test_sanitizer_sized_virtual_ranks() -> None:
    """Small enough for compute-sanitizer."""
    for collective in COLLECTIVES:
        virtual = VirtualRanks(3, "cuda", blocks=2, slot_bytes=4096)
        shape = OpSpec(
            collective, "sum", (TensorSpec(4000, torch.float32, codec("int8")),), DIRECT[collective][0]
        )
        fused = [on_device(buffers) for buffers in tensors(collective, 3, 4000, torch.float32, True)]
        virtual.fused.launch(virtual.fused.prepare(shape), [[buffers] for buffers in fused])
        virtual.check()


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_graph_replays_fused_collectives(algorithm: str) -> None:
    ranks, numel = 4, 30_000
    virtual = VirtualRanks(ranks, "cuda")
    plan = virtual.plan("all_reduce", numel, torch.float32, "int8", algorithm=algorithm)
    xs = [torch.full((numel,), float(rank), device="cuda") for rank in range(ranks)]
    virtual.run(plan, xs, xs)  # kernels are loaded when they are first used
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        virtual.run(plan, xs, xs)
    for turn in range(3):
        for rank, x in enumerate(xs):
            x.fill_(turn + rank)
        graph.replay()
        expected = float(sum(turn + rank for rank in range(ranks)))
        assert all(torch.allclose(x, torch.full_like(x, expected), rtol=0.05) for x in xs)
    virtual.check()


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_fused_kernels_are_queued_without_synchronization(algorithm: str) -> None:
    virtual = VirtualRanks(2, "cuda")
    xs = [torch.ones(1000, device="cuda") for _ in range(2)]
    plan = virtual.plan("all_reduce", 1000, torch.float32, "int8", algorithm=algorithm)
    virtual.run(plan, xs, xs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            virtual.run(plan, xs, xs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    virtual.check()


def test_absent_rank_is_named() -> None:
    layout = PeerBufferLayout(2)
    size = _C.fused_bytes(2, layout)
    memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pad = memory[0][_C.MISSING_OFFSET :][:4].view(torch.int32)
    addresses = [tensor.data_ptr() for tensor in memory]
    first_rank = FusedRanks(
        CudaLauncher(torch.device("cuda")), layout, addresses, [pad], 0, 1, timeout_ns=50_000_000
    )
    x = torch.ones(5000, device="cuda")
    shape = OpSpec("all_reduce", "sum", (TensorSpec(5000, torch.float32, codec("int8")),), "two_shot")
    first_rank.launch(first_rank.prepare(shape), [[Buffers(x, x)]])
    assert int(pad) == 2
