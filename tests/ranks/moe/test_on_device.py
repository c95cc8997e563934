"""Expert parallelism on fake CUDA tensors: the CPU's bits, and only the documented waits of the host."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import dtcomm.collectives as C
from dtcomm import moe
from dtcomm.launch.ranks import run_ranks
from tests.ranks.moe.test_moe import EXPERTS, make_case
from tests.support.fake_cuda_ranks import fake_cuda_rank
from tests.support.fake_cuda_tensor import host_copy, to_fake_cuda, unchecked
from tests.support.stream_checker import RecordedStreams


def forward(rank: int, on_device: bool, codec: str, padded: bool) -> list[torch.Tensor]:
    """Dispatch, apply an elementwise expert and combine; return the intermediate and final results on the host."""
    x, experts, weights, _ = make_case(rank)
    if on_device:
        x, experts, weights = to_fake_cuda(x), to_fake_cuda(experts), to_fake_cuda(weights)
    with torch.no_grad():
        if padded:
            tokens, padded_route = moe.dispatch_padded(x, experts, EXPERTS, 4, codec=codec)
            y = moe.combine_padded(tokens * 2.0, padded_route, weights)
            tokens = tokens * padded_route.mask[:, :, None]
        else:
            tokens, route = moe.dispatch(x, experts, EXPERTS, codec=codec)
            y = moe.combine(tokens * 2.0, route, weights)
    results = [tokens * 1.0, y * 1.0]
    with unchecked():
        return [host_copy(result) for result in results] if on_device else results


def compare(rank: int, world_size: int) -> list[dict[str, Any]]:
    outcomes = []
    cases = list(itertools.product(("none", "int8"), (False, True)))
    expected = [forward(rank, False, *case) for case in cases]
    streams = RecordedStreams()
    with fake_cuda_rank(streams):
        for case, on_host in zip(cases, expected, strict=True):
            streams.faults.clear()
            on_device = forward(rank, True, *case)
            same = [torch.equal(a, b) for a, b in zip(on_host, on_device, strict=True)]
            outcomes.append({"padded": case[1], "same": same, "waits": list(streams.faults)})
        C.release()
    return outcomes


def test_the_host_waits_once_or_never_and_results_equal_the_cpus() -> None:
    for outcomes in run_ranks(compare, 2, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120):
        for outcome in outcomes:
            assert all(outcome["same"])
            waits = [] if outcome["padded"] else ["the host waits for the device in tolist"]
            assert outcome["waits"] == waits
