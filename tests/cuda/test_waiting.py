"""No host waits for the device in a step: shown by a profiler's trace of it, in which kernels were seen to run.

torch.cuda.set_sync_debug_mode knows of torch's own calls alone; the profiler sees all that reach CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm import ddp, fsdp, tp
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure.virtual_ranks import VirtualRanks
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
def test_a_wait_is_seen(wait: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(1000, device="cuda")
    seen = trace(lambda: wait(x.mul_(2)))
    assert seen.waits and seen.kernels


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "ring"])
def test_virtual_ranks(algorithm: str) -> None:
    virtual = VirtualRanks(4, "cuda")
    xs = [torch.ones(30_000, device="cuda") for _ in range(4)]
    plan = virtual.plan("all_reduce", 30_000, torch.float32, "int8", algorithm=algorithm)
    virtual.run(plan, xs, xs)
    seen = trace(lambda: virtual.run(plan, xs, xs))
    assert seen.waits == [] and seen.ran("step_kernel" if algorithm == "ring" else "fused_kernel")
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

    def step() -> None:
        model.zero_grad()
        model().backward()

    return step


def tp_step(rank: int, world_size: int) -> Step:
    layer = tp.RowParallelLinear(64, 96, bias=True, codec="int8", device="cuda")
    x = torch.ones(32, 64 // world_size, device="cuda", requires_grad=True)

    def step() -> None:
        layer(x).sum().backward()

    return step


def traced(rank: int, world_size: int, prepare: Callable[[int, int], Step]) -> tuple[Trace, dict[str, Any]]:
    step = prepare(rank, world_size)
    # Connections are made, DDP's buckets are laid out anew, its first step is one in which norms are read, and in the
    # first ten torch reads the clocks of DDP.
    for _ in range(12):
        step()
    seen = trace(step)
    return seen, C.info()["devices"]


@pytest.mark.parametrize("prepare", [collectives, ddp_step, fsdp_step, tp_step])
def test_a_step_of_processes_that_share_a_device(prepare: Callable[[int, int], Step]) -> None:
    """Over fused kernels. Fresh processes: torch numbers what they have met for."""
    for seen, devices in run_ranks(traced, 2, prepare, env=PEER_RUNTIME, timeout=100, fresh=True):
        assert seen.waits == [] and (seen.ran("fused_kernel") or seen.ran("step_kernel")), devices


def nccl_by_itself(rank: int, world_size: int) -> dict[str, Any]:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=60)
    device = torch.device("cuda", 0)
    exchange = NcclTransport(dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options), "nccl", device)
    given = torch.arange(4096, dtype=torch.uint8, device=device)
    outs = [torch.zeros_like(given) for _ in range(2)]

    def call() -> None:
        handles = [exchange.all_to_all(outs[0], [4096], given, [4096]), exchange.all_gather(outs[1], given)]
        for handle in handles:
            exchange.wait(handle)

    call()
    torch.cuda.synchronize()
    wrong = [i for i, out in enumerate(outs) if not torch.equal(out, given)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    given.add_(1)
    graph.replay()
    wrong += [2 + i for i, out in enumerate(outs) if not torch.equal(out, given)]
    seen = trace(call)
    exchange.close()
    return {"wrong": wrong, "waits": seen.waits, "kernels": seen.kernels}


def test_nccl_with_one_rank() -> None:
    """Two need two devices. What is called of it, that a graph captures it and that nothing waits is the same."""
    (said,) = run_ranks(nccl_by_itself, 1, backend=None, timeout=100)
    assert said["wrong"] == [] and said["waits"] == [] and said["kernels"]
