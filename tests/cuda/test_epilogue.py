"""What follows a sum on a device: bias, addend and norm with the CPU's bits, in the kernel of the sum or behind it; and
layers of tensor parallelism.
"""

from __future__ import annotations

import os

import pytest
import torch

import dtcomm.collectives as C
from dtcomm import tp
from dtcomm.kernels import ops
from dtcomm.kernels.epilogue import epilogue, epilogue_task
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure.virtual_ranks import VirtualRanks
from dtcomm.runtime.cuda_peer.launch import FusedEpilogue
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC
from dtcomm.tp.emulate import emulate_all_reduce
from tests.cuda.device_cases import NEEDS_GPU, PEER_RUNTIME
from tests.support.host_sync_trace import trace
from tests.unit.runtime.test_fused import SPECS
from tests.unit.runtime.test_fused_epilogue import (
    FEATURES,
    ROWS,
    TYPES,
    RankTensors,
    by_the_engine,
    same,
)

pytestmark = NEEDS_GPU


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "features"), [(1, 1), (17, 150), (64, 4096)])
def test_triton_gives_the_cpu_s_bits(rows: int, features: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(features)
    x, stream = (torch.randn(rows, features, generator=dice).to(dtype) for _ in "ab")
    bias, weight = (torch.randn(features, generator=dice).to(dtype) for _ in "ab")
    for spec in ("int8", "fp8_e4m3"):
        for terms in ((), ("bias",), ("residual",), ("bias", "residual")):
            found = []
            for device in ("cpu", "cuda"):
                there = {"bias": bias.to(device), "residual": stream.to(device)}
                given = {name: there[name] for name in terms}
                payload = ops.encode(spec, x.view(-1).to(device))
                out, normed, again = (torch.empty(rows, features, dtype=dtype, device=device) for _ in "abc")
                norm = {"weight": weight.to(device), "eps": 1e-5}
                epilogue(spec, [(payload, x.numel())], out, **given, **norm, norm_out=normed)
                sums = x.to(device, copy=True)
                epilogue_task(sums, **given, **norm, norm_out=again)()
                found.append(bits([out, normed, sums, again]))
            same(*found)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_virtual_ranks_add_what_the_engine_adds(algorithm: str, ranks: int) -> None:
    virtual = VirtualRanks(ranks, "cuda")
    for turn, spec in enumerate(SPECS):
        dtype = TYPES[turn % 3]
        theirs = RankTensors(ranks, dtype)
        ours = [x.cuda() for x in theirs.sums]
        after = [FusedEpilogue(theirs.bias.cuda(), each.cuda()) for each in theirs.residuals]
        plan = virtual.plan("all_reduce", ROWS * FEATURES, dtype, spec, algorithm=algorithm, op="avg")
        virtual.run(plan, ours, ours, epilogues=after)
        by_the_engine(theirs, algorithm, spec, ("bias", "residual"))
        same(bits(ours), theirs.sums)
    virtual.check()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_symmetric_sum_of_virtual_ranks(ranks: int) -> None:
    virtual = VirtualRanks(ranks, "cuda")
    for turn, spec in enumerate(SPECS[1:]):
        dtype = TYPES[turn % 3]
        given = RankTensors(ranks, dtype)
        expected = emulate_all_reduce(given.sums, spec, TWO_SHOT_SYMMETRIC)
        ours = [x.cuda() for x in given.sums]
        plan = virtual.plan("all_reduce", ROWS * FEATURES, dtype, spec, algorithm=TWO_SHOT_SYMMETRIC)
        virtual.run(plan, ours, ours)
        same(bits(ours), [expected] * ranks)
    virtual.check()


def test_sanitizer_sized_epilogue() -> None:
    """Little enough for compute-sanitizer."""
    virtual = VirtualRanks(3, "cuda", blocks=2, slot_bytes=4096)
    given = RankTensors(3, torch.bfloat16)
    for algorithm in ("one_shot", "two_shot", TWO_SHOT_SYMMETRIC):
        plan = virtual.plan("all_reduce", ROWS * FEATURES, torch.bfloat16, "int8", algorithm=algorithm)
        ours = [x.cuda() for x in given.sums]
        virtual.run(
            plan, ours, ours, epilogues=[FusedEpilogue(given.bias.cuda(), x.cuda()) for x in given.residuals]
        )
    virtual.check()


def test_a_graph_replays_a_sum_with_what_follows() -> None:
    ranks, numel = 4, 64 * 200
    virtual = VirtualRanks(ranks, "cuda")
    plan = virtual.plan("all_reduce", numel, torch.float32, "int8", algorithm="two_shot")
    xs = [torch.ones(numel, device="cuda") for _ in range(ranks)]
    bias = torch.ones(64, device="cuda")
    after = [FusedEpilogue(bias, None)] * ranks
    virtual.run(plan, xs, xs, epilogues=after)  # kernels are loaded when they are first used
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        virtual.run(plan, xs, xs, epilogues=after)
    for turn in range(3):
        bias.fill_(turn)
        for x in xs:
            x.fill_(1.0)
        graph.replay()
        assert all(torch.allclose(x, torch.full_like(x, ranks + turn), rtol=0.02) for x in xs)
    virtual.check()


def layers(rank: int, world_size: int, device: str) -> list[torch.Tensor]:
    """Whole numbers where something is multiplied, so that products are the same on every device."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for algorithm in ("one_shot", "two_shot", "two_shot_symmetric", "ring"):
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
            found += [y.detach().cpu(), normed.detach().cpu()]
            x = x.requires_grad_()
            layer(x, stream).sum().backward()
            found.append(x.grad.cpu())
    return found


def both_devices(rank: int, world_size: int) -> dict[str, object]:
    chosen = os.environ["DTCOMM_RUNTIME"]
    os.environ["DTCOMM_RUNTIME"] = "auto"
    here = layers(rank, world_size, "cpu")
    os.environ["DTCOMM_RUNTIME"] = chosen
    there = layers(rank, world_size, "cuda")
    different = [i for i, (a, b) in enumerate(zip(here, there, strict=True)) if not torch.equal(a, b)]
    seen: list[str] = []
    if chosen == "peer":
        x, bias = torch.ones(ROWS, FEATURES, device="cuda"), torch.ones(FEATURES, device="cuda")
        then = epilogue_task(x, bias=bias)
        C.all_reduce(x, codec="int8", algorithm="two_shot", epilogue=then)
        seen = trace(lambda: C.all_reduce(x, codec="int8", algorithm="two_shot", epilogue=then)).waits
    info = next(iter(C.info()["devices"].values()))
    return {"different": different, "waits": seen, "runtime": info["runtime"]}


@pytest.mark.parametrize("runtime", ["peer", "process_group"])
def test_layers_give_the_cpu_s_bits(runtime: str) -> None:
    """By fused kernels, and over Gloo with the epilogue behind the sum."""
    for said in run_ranks(both_devices, 2, env={**PEER_RUNTIME, "DTCOMM_RUNTIME": runtime}, timeout=240):
        assert said == {"different": [], "waits": [], "runtime": runtime}
