"""Epilogues of sums on a device: bias, addend and norm have the CPU's bits, in the kernel of the sum or after it; and
layers of tensor parallelism.
"""

from __future__ import annotations

import os

import pytest
import torch

import dtcomm.collectives as C
from bench.common.virtual_ranks import VirtualRanks
from dtcomm import tp
from dtcomm.kernels import ops
from dtcomm.kernels.epilogue import epilogue, epilogue_task
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.cuda_peer.launch import FusedEpilogue
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC
from tests.cuda.device_cases import NEEDS_GPU, PEER_RUNTIME
from tests.support.host_sync_trace import trace
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

pytestmark = NEEDS_GPU


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "features"), [(1, 1), (17, 150), (64, 4096)])
def test_epilogue_matches_cpu_bits(rows: int, features: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(features)
    x, stream = (torch.randn(rows, features, generator=dice).to(dtype) for _ in "ab")
    bias, weight = (torch.randn(features, generator=dice).to(dtype) for _ in "ab")
    for spec in ("int8", "fp8_e4m3"):
        for terms in ((), ("bias",), ("addend",), ("bias", "addend")):
            results = []
            for device in ("cpu", "cuda"):
                tensors = {"bias": bias.to(device), "addend": stream.to(device)}
                operands = {name: tensors[name] for name in terms}
                payload = ops.encode(spec, x.view(-1).to(device))
                out, normed, normed_again = (
                    torch.empty(rows, features, dtype=dtype, device=device) for _ in "abc"
                )
                norm = {"weight": weight.to(device), "eps": 1e-5}
                epilogue(spec, [(payload, x.numel())], out, **operands, **norm, norm_out=normed)
                sums = x.to(device, copy=True)
                epilogue_task(sums, **operands, **norm, norm_out=normed_again)()
                results.append(bits([out, normed, sums, normed_again]))
            same(*results)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_fused_epilogue_matches_engine(algorithm: str, ranks: int) -> None:
    virtual = VirtualRanks(ranks, "cuda")
    for turn, spec in enumerate(SPECS):
        dtype = TYPES[turn % 3]
        reference = RankTensors(ranks, dtype)
        sums = [x.cuda() for x in reference.sums]
        epilogues = [
            FusedEpilogue(reference.bias.cuda(), residual.cuda()) for residual in reference.residuals
        ]
        plan = virtual.plan("all_reduce", ROWS * FEATURES, dtype, spec, algorithm=algorithm, op="avg")
        virtual.run(plan, sums, sums, epilogues=epilogues)
        run_by_engine(reference, algorithm, spec, ("bias", "addend"))
        same(bits(sums), reference.sums)
    virtual.check()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_symmetric_sum_of_virtual_ranks_matches_reference(ranks: int) -> None:
    virtual = VirtualRanks(ranks, "cuda")
    for turn, spec in enumerate(SPECS[1:]):
        dtype = TYPES[turn % 3]
        inputs = RankTensors(ranks, dtype)
        expected = symmetric_sum(inputs.sums, spec)
        sums = [x.cuda() for x in inputs.sums]
        plan = virtual.plan("all_reduce", ROWS * FEATURES, dtype, spec, algorithm=TWO_SHOT_SYMMETRIC)
        virtual.run(plan, sums, sums)
        same(bits(sums), [expected] * ranks)
    virtual.check()


def test_sanitizer_sized_epilogue() -> None:
    """Small enough for compute-sanitizer."""
    virtual = VirtualRanks(3, "cuda", blocks=2, slot_bytes=4096)
    inputs = RankTensors(3, torch.bfloat16)
    for algorithm in ("one_shot", "two_shot", TWO_SHOT_SYMMETRIC):
        plan = virtual.plan("all_reduce", ROWS * FEATURES, torch.bfloat16, "int8", algorithm=algorithm)
        sums = [x.cuda() for x in inputs.sums]
        virtual.run(
            plan,
            sums,
            sums,
            epilogues=[FusedEpilogue(inputs.bias.cuda(), x.cuda()) for x in inputs.residuals],
        )
    virtual.check()


def test_graph_replays_sum_with_epilogue() -> None:
    ranks, numel = 4, 64 * 200
    virtual = VirtualRanks(ranks, "cuda")
    plan = virtual.plan("all_reduce", numel, torch.float32, "int8", algorithm="two_shot")
    xs = [torch.ones(numel, device="cuda") for _ in range(ranks)]
    bias = torch.ones(64, device="cuda")
    epilogues = [FusedEpilogue(bias, None)] * ranks
    virtual.run(plan, xs, xs, epilogues=epilogues)  # kernels are loaded when they are first used
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        virtual.run(plan, xs, xs, epilogues=epilogues)
    for turn in range(3):
        bias.fill_(turn)
        for x in xs:
            x.fill_(1.0)
        graph.replay()
        assert all(torch.allclose(x, torch.full_like(x, ranks + turn), rtol=0.02) for x in xs)
    virtual.check()


def layers(rank: int, world_size: int, device: str) -> list[torch.Tensor]:
    """Outputs and gradients of row-parallel layers; factors are integers, so products are equal on every device."""
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        for algorithm in ("one_shot", "two_shot", "two_shot_symmetric"):
            dice = torch.Generator().manual_seed(5)
            layer = tp.RowParallelLinear(
                64, FEATURES, codec="int8", algorithm=algorithm, latency=False, device=device, dtype=dtype
            )
            weight = torch.randint(-2, 3, (FEATURES, 64), generator=dice).float()
            with torch.no_grad():
                layer.weight.copy_(weight[:, rank * 64 // world_size : (rank + 1) * 64 // world_size])
                layer.bias.copy_(torch.randn(FEATURES, generator=dice))
            mine = torch.Generator().manual_seed(rank)
            x = torch.randint(-2, 3, (ROWS, 64 // world_size), generator=mine).to(device, dtype)
            stream = torch.randn(ROWS, FEATURES, generator=dice).to(device, dtype)
            scale = torch.randn(FEATURES, generator=dice).to(device, dtype)
            y, normed = layer.with_norm(x, stream, scale)
            outputs += [y.detach().cpu(), normed.detach().cpu()]
            x = x.requires_grad_()
            layer(x, stream).sum().backward()
            outputs.append(x.grad.cpu())
    return outputs


def both_devices(rank: int, world_size: int) -> dict[str, object]:
    chosen = os.environ["DTCOMM_RUNTIME"]
    os.environ["DTCOMM_RUNTIME"] = "auto"
    on_cpu = layers(rank, world_size, "cpu")
    os.environ["DTCOMM_RUNTIME"] = chosen
    on_gpu = layers(rank, world_size, "cuda")
    different = [i for i, (a, b) in enumerate(zip(on_cpu, on_gpu, strict=True)) if not torch.equal(a, b)]
    waits: list[str] = []
    if chosen == "peer":
        x, bias = torch.ones(ROWS, FEATURES, device="cuda"), torch.ones(FEATURES, device="cuda")
        hook = epilogue_task(x, bias=bias)
        C.all_reduce(x, codec="int8", algorithm="two_shot", epilogue=hook)
        waits = trace(lambda: C.all_reduce(x, codec="int8", algorithm="two_shot", epilogue=hook)).waits
    info = next(iter(C.info()["devices"].values()))
    return {"different": different, "waits": waits, "runtime": info["runtime"]}


@pytest.mark.parametrize("runtime", ["peer", "process_group"])
def test_row_parallel_layers_match_cpu_bits(runtime: str) -> None:
    """With fused kernels, and over Gloo with the epilogue after the sum."""
    for report in run_ranks(both_devices, 2, env={**PEER_RUNTIME, "DTCOMM_RUNTIME": runtime}, timeout=240):
        assert report == {"different": [], "waits": [], "runtime": runtime}
