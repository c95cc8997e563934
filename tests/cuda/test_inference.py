"""The all-reduce of inference engines, experts and pipeline links between two processes on one device: the CPU's bits,
graphs, no wait of the host, and the allocator's expandable segments.

tests/ranks/tp/test_emulated_peers.py runs some of the bodies on the CPU, with the fused kernels in the emulator.
"""

from __future__ import annotations

import os

import pytest
import torch

import dtcomm
from dtcomm import moe, tp
from dtcomm.kernels.epilogue import empty_quantized, epilogue_task
from dtcomm.launch.ranks import run_ranks
from tests.cuda.device_cases import NEEDS_GPU, PEER_RUNTIME

pytestmark = NEEDS_GPU
FEATURES = 1024
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def activations(rank: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, FEATURES, generator=torch.Generator().manual_seed(rank)).bfloat16()


def without_waiting() -> None:
    torch.cuda.set_sync_debug_mode("error")


def sums(rank: int, world_size: int, codec: str) -> dict[str, object]:
    """Compare sums with those of the CPU, launched and replayed from a graph that several calls of one size share."""
    os.environ["DTCOMM_RUNTIME"] = "auto"
    on_cpu = tp.AllReduce(codec=codec, compress_from=64 * 1024)
    sizes = (1, 16, 256)
    expected = [on_cpu(activations(rank, tokens)) for tokens in sizes]
    os.environ["DTCOMM_RUNTIME"] = "peer"
    slot = tp.CustomAllReduce(None, "cuda", codec=codec, compress_from=64 * 1024)
    report: dict[str, object] = {"reason": slot.reason, "different": []}
    for tokens, result in zip(sizes, expected, strict=True):
        x = activations(rank, tokens).cuda()
        assert slot.should_custom_ar(x)
        launched = slot.custom_all_reduce(x)
        graph = torch.cuda.CUDAGraph()
        with slot.capture(), torch.cuda.graph(graph):
            first = slot.custom_all_reduce(x)
            second = slot.custom_all_reduce(x)
        x.zero_()
        without_waiting()
        graph.replay()
        x.copy_(activations(rank, tokens).pin_memory(), non_blocking=True)
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        for name, y in (("launched", launched), ("first", first), ("second", second)):
            if not torch.equal(y.cpu(), result):
                report["different"].append((name, tokens))  # type: ignore[attr-defined]
    return report


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3", "int4:block=128,spikes=1"])
def test_sums_match_cpu_bits_in_graphs(codec: str) -> None:
    for report in run_ranks(sums, 2, codec, env=PEER_RUNTIME, timeout=120):
        assert report == {"reason": "", "different": []}


def test_sums_with_expandable_segments() -> None:
    environment = {**PEER_RUNTIME, **EXPANDABLE}
    for report in run_ranks(sums, 2, "int8", env=environment, fresh=True, timeout=120):
        assert report == {"reason": "", "different": []}


def quantized_norms(rank: int, device: str) -> list[torch.Tensor]:
    stream, weight = activations(7, 33).to(device), activations(8, 1)[0].to(device)
    tensors = []
    for values in (torch.float8_e4m3fn, torch.int8):
        for group in (None, 128):
            y = activations(rank, 33).to(device)
            x = empty_quantized(y, values, group)
            task = epilogue_task(y, addend=stream, weight=weight, quantized=x)
            dtcomm.all_reduce(y, codec="int8", algorithm="two_shot", epilogue=task)
            tensors += [y.cpu(), x.values.cpu().view(torch.uint8), x.scales.cpu()]
    return tensors


def compare_quantized_norms(rank: int, world_size: int) -> list[int]:
    os.environ["DTCOMM_RUNTIME"] = "auto"
    on_cpu = quantized_norms(rank, "cpu")
    os.environ["DTCOMM_RUNTIME"] = "peer"
    on_gpu = quantized_norms(rank, "cuda")
    return [i for i, (a, b) in enumerate(zip(on_cpu, on_gpu, strict=True)) if not torch.equal(a, b)]


def test_quantized_norms_match_cpu_bits() -> None:
    assert run_ranks(compare_quantized_norms, 2, env=PEER_RUNTIME, timeout=120) == [[], []]


def experts(rank: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(40 + rank, 64, generator=generator).to(device)
    choices = torch.randint(0, 8, (40 + rank, 2), generator=generator).to(device)
    weights = torch.rand(40 + rank, 2, generator=generator).to(device)
    results = []
    for codec in ("none", "int8"):
        rows, route = moe.dispatch(x, choices, 8, codec=codec)
        results += [rows, moe.combine(rows * 2, route, weights)]
        moe.dispatch_padded(x, choices, 8, 12, codec=codec)  # plans and connections
        if device == "cuda":
            torch.cuda.synchronize()
            without_waiting()
        padded, padded_route = moe.dispatch_padded(x, choices, 8, 12, codec=codec)
        combined = moe.combine_padded(padded * 2, padded_route, weights)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        results += [padded, combined, padded_route.counts]
    return [result.cpu() for result in results]


def compare_experts(rank: int, world_size: int) -> list[int]:
    os.environ["DTCOMM_RUNTIME"] = "auto"
    on_cpu = experts(rank, "cpu")
    os.environ["DTCOMM_RUNTIME"] = "peer"
    on_gpu = experts(rank, "cuda")
    return [i for i, (a, b) in enumerate(zip(on_cpu, on_gpu, strict=True)) if not torch.equal(a, b)]


def test_experts_match_cpu_bits_without_waiting() -> None:
    assert run_ranks(compare_experts, 2, env=PEER_RUNTIME, timeout=120) == [[], []]


def links(rank: int, device: str) -> list[torch.Tensor]:
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()
    received = []
    for codec in ("none", "int8"):
        if rank == 0:
            sender = dtcomm.pipeline.Sender(1, codec)
            sender(x * 1.0).backward()
            sender.flush()
            received.append(x.grad.cpu().clone())
        else:
            receiver = dtcomm.pipeline.Receiver(0, codec)
            y = receiver((16, 256), device=device)
            (y * y).sum().backward()
            receiver.flush()
            received.append(y.detach().cpu())
    return received


def compare_links(rank: int, world_size: int) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(links(rank, "cpu"), links(rank, "cuda"), strict=True)]


def test_pipeline_links_match_cpu_bits() -> None:
    assert (
        run_ranks(compare_links, 2, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120) == [[True] * 2] * 2
    )
