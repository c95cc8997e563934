"""The host never waits for the device during a step: the profiler's trace shows kernels but no synchronization.

torch.cuda.set_sync_debug_mode knows only torch's own calls; the profiler sees all calls that reach CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm.collectives as C
from bench.common.virtual_ranks import VirtualRanks
from dtcomm import ddp, fsdp, tp
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.torchdist.transport import NcclTransport
from tests.cuda.device_cases import NEEDS_GPU, PEER_RUNTIME, FixedGradientModel
from tests.support.host_sync_trace import Trace, trace

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().record_event().synchronize(),
    ],
    ids=["item", "cpu", "device", "stream", "event"],
)
def test_trace_records_synchronization(wait: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(1000, device="cuda")
    recording = trace(lambda: wait(x.mul_(2)))
    assert recording.waits and recording.kernels


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_virtual_ranks_do_not_synchronize(algorithm: str) -> None:
    virtual = VirtualRanks(4, "cuda")
    xs = [torch.ones(30_000, device="cuda") for _ in range(4)]
    plan = virtual.plan("all_reduce", 30_000, torch.float32, "int8", algorithm=algorithm)
    virtual.run(plan, xs, xs)
    recording = trace(lambda: virtual.run(plan, xs, xs))
    assert recording.waits == [] and recording.ran("fused_kernel")
    virtual.check()


Step = Callable[[], object]


def collectives(rank: int, world_size: int) -> Step:
    x, gathered = torch.ones(50_000, device="cuda"), torch.empty(100_000, device="cuda")

    def step() -> None:
        C.all_reduce(x, "avg", codec="int8", algorithm="two_shot")
        works = [C.all_reduce(x, codec="int8", algorithm="one_shot", async_op=True)]
        works.append(C.all_gather(gathered, x, codec="fp8_e4m3", async_op=True))
        works[0].get_future().wait()
        for work in works:
            work.wait()

    return step


def ddp_step(rank: int, world_size: int) -> Step:
    model = torch.nn.parallel.DistributedDataParallel(FixedGradientModel(rank, "cuda"))
    ddp.compress(model, "int8")

    def step() -> None:
        model.zero_grad()
        model().backward()

    return step


def fsdp_step(rank: int, world_size: int) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = FixedGradientModel(rank, "cuda")
    fully_shard(model, mesh=dist.init_device_mesh("cuda", (world_size,)))
    fsdp.compress(model, gradients="int8", parameters="fp8_e4m3")
    factor = torch.ones((), device="cuda")

    def step() -> None:
        model.zero_grad()
        model(factor).backward()

    return step


def tp_step(rank: int, world_size: int) -> Step:
    layer = tp.RowParallelLinear(64, 96, bias=True, codec="int8", device="cuda")
    x = torch.ones(32, 64 // world_size, device="cuda", requires_grad=True)

    def step() -> None:
        layer(x).sum().backward()

    return step


def traced(rank: int, world_size: int, prepare: Callable[[int, int], Step]) -> tuple[Trace, dict[str, Any]]:
    """Record a step; return the record and what the default group reports, which FSDP's mesh need not use."""
    step = prepare(rank, world_size)
    # The first steps connect and rebuild DDP's buckets, the first one reads norms, and in the first ten torch reads
    # DDP's timers.
    for _ in range(12):
        step()
    recording = trace(step)
    return recording, C.info()


@pytest.mark.parametrize("prepare", [collectives, ddp_step, fsdp_step, tp_step])
def test_step_between_processes_does_not_synchronize(prepare: Callable[[int, int], Step]) -> None:
    """Over fused kernels. Fresh processes: torch numbers the rendezvous of a process."""
    for recording, info in run_ranks(traced, 2, prepare, env=PEER_RUNTIME, timeout=100, fresh=True):
        assert recording.waits == [] and recording.ran("fused_kernel"), info


def trace_nccl_transport(rank: int, world_size: int) -> dict[str, Any]:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=60)
    device = torch.device("cuda", 0)
    transport = NcclTransport(dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options), "nccl", device)
    source = torch.arange(4096, dtype=torch.uint8, device=device)
    outputs = [torch.zeros_like(source) for _ in range(2)]

    def call() -> None:
        handles = [
            transport.all_to_all(outputs[0], [4096], source, [4096]),
            transport.all_gather(outputs[1], source),
        ]
        for handle in handles:
            transport.wait(handle)

    call()
    torch.cuda.synchronize()
    wrong = [i for i, output in enumerate(outputs) if not torch.equal(output, source)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    source.add_(1)
    graph.replay()
    wrong += [2 + i for i, output in enumerate(outputs) if not torch.equal(output, source)]
    recording = trace(call)
    transport.close()
    return {"wrong": wrong, "waits": recording.waits, "kernels": recording.kernels}


def test_nccl_transport_of_one_rank_is_capturable_and_does_not_synchronize() -> None:
    """Two ranks would need two devices; the calls, graph capture and synchronization are the same with one."""
    (report,) = run_ranks(trace_nccl_transport, 1, backend=None, timeout=100)
    assert report["wrong"] == [] and report["waits"] == [] and report["kernels"]
