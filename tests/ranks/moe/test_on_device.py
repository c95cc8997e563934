"""Expert parallelism on fake CUDA tensors: the CPU's bits, and only the two documented waits of the host."""

from __future__ import annotations

from typing import Any

import torch

import dtcomm.collectives as C
from dtcomm import moe
from dtcomm.launch.ranks import run_ranks
from tests.ranks.moe.test_moe import EXPERTS, make_case
from tests.support.fake_cuda_ranks import fake_cuda_rank
from tests.support.fake_cuda_tensor import host_copy, to_fake_cuda, unchecked
from tests.support.stream_checker import RecordedStreams


def forward(rank: int, on_device: bool, codec: str) -> list[torch.Tensor]:
    """Dispatch, apply an elementwise expert and combine; return the intermediate and final results on the host."""
    x, experts, weights, _ = make_case(rank)
    if on_device:
        x, experts, weights = to_fake_cuda(x), to_fake_cuda(experts), to_fake_cuda(weights)
    with torch.no_grad():
        tokens, route = moe.dispatch(x, experts, EXPERTS, codec=codec)
        y = moe.combine(tokens * 2.0, route, weights)
    results = [tokens * 1.0, y * 1.0]
    with unchecked():
        return [host_copy(result) for result in results] if on_device else results


def compare(rank: int, world_size: int) -> list[dict[str, Any]]:
    outcomes = []
    codecs = ("none", "int8")
    expected = [forward(rank, False, codec) for codec in codecs]
    streams = RecordedStreams()
    with fake_cuda_rank(streams):
        for codec, on_host in zip(codecs, expected, strict=True):
            streams.faults.clear()
            on_device = forward(rank, True, codec)
            same = [torch.equal(a, b) for a, b in zip(on_host, on_device, strict=True)]
            outcomes.append({"same": same, "waits": list(streams.faults)})
        C.release()
    return outcomes


def test_the_host_waits_twice_and_results_equal_the_cpus() -> None:
    for outcomes in run_ranks(compare, 2, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120):
        for outcome in outcomes:
            assert all(outcome["same"])
            assert outcome["waits"] == ["the host waits for the device in tolist"] * 2
