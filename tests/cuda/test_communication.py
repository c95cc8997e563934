"""Collectives of CUDA tensors over Gloo, NCCL and fused kernels give the CPU's bits without host synchronization.

One device is enough, except for tests marked `two_devices`: ranks share it, or are virtual.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm import ddp, fsdp, tp
from dtcomm.compress.guard import Guard
from dtcomm.compress.monitor import Monitor
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.cuda_peer import memory
from dtcomm.streams import AsyncHostCopy
from tests.cuda.device_cases import NEEDS_GPU, PEER_RUNTIME, FixedGradientModel
from tests.unit.runtime.every_collective import calls

pytestmark = NEEDS_GPU
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
FEW = {"specs": ("none", "int8", "int8:round=stochastic"), "sizes": (1, 20_001)}


# --- fused kernels between processes


def all_reduce_by_fused_kernels(rank: int, world_size: int) -> dict[str, object]:
    wrong = []
    for turn in range(2):
        for spec in ("none", "int8", "int4", "fp8_e4m3"):
            for algorithm in ("two_shot", "one_shot"):
                on_cpu = torch.randn(20_000, generator=torch.Generator().manual_seed(rank + turn))
                on_gpu, losses = on_cpu.cuda(), [torch.zeros(20_000), torch.zeros(20_000, device="cuda")]
                os.environ["DTCOMM_RUNTIME"] = "auto"
                C.all_reduce(on_cpu, "avg", codec=spec, algorithm=algorithm, residual=losses[0])
                os.environ["DTCOMM_RUNTIME"] = "peer"
                C.all_reduce(on_gpu, "avg", codec=spec, algorithm=algorithm, residual=losses[1])
                if not (torch.equal(on_cpu, on_gpu.cpu()) and torch.equal(losses[0], losses[1].cpu())):
                    wrong.append((spec, algorithm, turn))
    x = torch.ones(100, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        C.all_reduce(x, codec="int8", algorithm="two_shot")
        work = C.all_reduce(x, codec="int8", algorithm="two_shot", async_op=True)
        work.wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    try:
        C.all_reduce(x, codec="topk:ratio=0.1", algorithm="two_shot")
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {"wrong": wrong, "info": C.info()["devices"], "refused": refused}


def without_symmetric_memory(rank: int, world_size: int) -> dict[str, object]:
    """`all_reduce_by_fused_kernels` over CUDA IPC handles, as where torch offers no symmetric memory."""
    allocate = memory.allocate

    def only_handles(kind: str, *rest: Any) -> memory.LocalBuffer:
        if kind == memory.SYMMETRIC:
            raise RuntimeError("left out by the test")
        return allocate(kind, *rest)

    memory.allocate = only_handles
    return all_reduce_by_fused_kernels(rank, world_size)


@pytest.mark.parametrize("body", [all_reduce_by_fused_kernels, without_symmetric_memory])
def test_fused_all_reduce_between_processes_matches_cpu_bits(body: Callable[..., dict[str, Any]]) -> None:
    kind = memory.SYMMETRIC if body is all_reduce_by_fused_kernels else memory.IPC
    for report in run_ranks(body, 2, env=PEER_RUNTIME, timeout=120, fresh=True):
        assert report["wrong"] == []
        assert [
            (device_info["runtime"], kind in device_info["transport"])
            for device_info in report["info"].values()
        ] == [("peer", True)], report["info"]
        assert "DTCOMM_RUNTIME=peer: codec topk" in report["refused"]


# --- over the group's own backend


def both_devices(rank: int, world_size: int) -> dict[str, object]:
    if torch.cuda.device_count() >= world_size:
        torch.cuda.set_device(rank)
    on_cpu = calls(rank, world_size, **FEW)
    on_gpu = calls(rank, world_size, timed=dist.get_backend() == "gloo", device="cuda", **FEW)
    return {
        "different": [i for i, (a, b) in enumerate(zip(on_cpu, on_gpu)) if not torch.equal(a, b)],
        "info": next(iter(C.info()["devices"].values())),
    }


def test_gloo_matches_cpu_bits() -> None:
    for report in run_ranks(both_devices, 2, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120):
        assert report["different"] == []
        assert "through the host's memory" in report["info"]["transport"]


@two_devices
def test_nccl_matches_cpu_bits() -> None:
    env = {"DTCOMM_RUNTIME": "process_group"}
    for report in run_ranks(both_devices, 2, env=env, backend="cpu:gloo,cuda:nccl", timeout=120):
        assert report["different"] == []
        assert "nccl" in report["info"]["transport"]


def captured(rank: int, world_size: int) -> bool:
    torch.cuda.set_device(rank)
    x = torch.ones(100_000, device="cuda")
    C.all_reduce(x, codec="int8", algorithm="two_shot")  # NCCL connects
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        C.all_reduce(x, codec="int8", algorithm="two_shot")
    x.fill_(rank + 1.0)
    torch.cuda.set_sync_debug_mode("error")
    graph.replay()
    C.all_reduce(torch.ones(10, device="cuda"), codec="int8", async_op=True).wait()
    torch.cuda.set_sync_debug_mode("default")
    return bool(torch.allclose(x, torch.full_like(x, 3.0), rtol=0.01))


@two_devices
def test_graph_captures_nccl_all_reduce_without_synchronization() -> None:
    env = {"DTCOMM_RUNTIME": "process_group"}
    assert run_ranks(captured, 2, env=env, backend="cpu:gloo,cuda:nccl", timeout=120) == [True, True]


def capture_all_reduce(rank: int, world_size: int) -> str:
    x = torch.ones(100, device="cuda")
    C.all_reduce(x)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(1)
            C.all_reduce(x)
    except DtcommError as error:
        return str(error)
    return "captured"


def test_graph_capture_of_gloo_all_reduce_is_refused() -> None:
    for message in run_ranks(capture_all_reduce, 2, env={"DTCOMM_RUNTIME": "process_group"}, timeout=60):
        assert "a graph cannot capture" in message


# --- integrations: gradients and activations have the same bits on every device


def ddp_gradients(rank: int, world_size: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(FixedGradientModel(rank, device))
    ddp.compress(model, "int4")
    gradients = []
    for _ in range(4):
        model.zero_grad()
        model().backward()
        gradients += [parameter.grad.cpu().clone() for parameter in model.parameters()]
    return gradients


def fsdp_gradients(rank: int, world_size: int, device: str) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = FixedGradientModel(rank, device)
    mesh = dist.init_device_mesh(device, (world_size,))
    fully_shard(model, mesh=mesh)
    fsdp.compress(model, gradients="int8", parameters="fp8_e4m3")
    gradients = []
    for _ in range(4):
        model.zero_grad()
        model(torch.ones((), device=device)).backward()
        gradients += [parameter.grad.to_local().cpu().clone() for parameter in model.parameters()]
    return gradients


def tp_outputs(rank: int, world_size: int, device: str) -> list[torch.Tensor]:
    # Small whole numbers: products and their sums are exact, whatever order they are taken in.
    dice = torch.Generator().manual_seed(5)
    layer = tp.RowParallelLinear(64, 96, bias=True, codec="int8", device=device)
    weight = torch.randint(-4, 5, (96, 64), generator=dice).float()
    with torch.no_grad():
        layer.weight.copy_(weight[:, rank * 64 // world_size : (rank + 1) * 64 // world_size])
        layer.bias.copy_(torch.arange(96.0))
    x = torch.randint(-4, 5, (32, 64 // world_size), generator=torch.Generator().manual_seed(rank)).float()
    x = x.to(device).requires_grad_()
    y = layer(x)
    y.sum().backward()
    return [y.detach().cpu(), x.grad.cpu()]


@pytest.mark.parametrize("integration", [ddp_gradients, fsdp_gradients, tp_outputs])
def test_integrations_match_cpu_bits(integration: Callable[..., list[torch.Tensor]]) -> None:
    for on_cpu, on_gpu in zip(
        run_ranks(integration, 2, "cpu", timeout=120), run_ranks(integration, 2, "cuda", timeout=120)
    ):
        assert len(on_cpu) == len(on_gpu) > 0
        assert all(torch.equal(a, b) for a, b in zip(on_cpu, on_gpu))


def test_ddp_guard_does_not_synchronize() -> None:
    """The results of finiteness checks stay on the device until an asynchronous copy brings them to the host."""
    monitor, mean = Monitor(Guard()), torch.ones(5000, device="cuda")
    own = torch.ones(5000, device="cuda")
    copies = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for bad in (False, True, False):
            mean.fill_(float("nan") if bad else 1.0)
            monitor.report_nonfinite(~torch.isfinite(mean).all(), ~torch.isfinite(own).all())
            mean.fill_(1.0)
            monitor.report_nonfinite(~torch.isfinite(mean).all(), ~torch.isfinite(own).all())
            copies.append(AsyncHostCopy(monitor.stats_tensor(mean.device)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stats = [copy.get() for copy in copies]
    assert [values[2].item() for values in stats] == [0.0, 1.0, 0.0]
    assert [values[3].item() for values in stats] == [0.0, 0.0, 0.0]  # this rank's own gradients are finite
