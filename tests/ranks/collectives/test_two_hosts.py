"""Two hosts, made of network namespaces: the engine's sockets over a real link."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.common import netns
from dtcomm import algorithms, collectives
from dtcomm.launch.ranks import run_ranks

WHY = netns.why_unavailable()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "-")


def reduce(
    rank: int, ranks: int, rendezvous: str, namespaces: list[str]
) -> dict[tuple[str, str, int], torch.Tensor]:
    """Return sums of small integers by codec, algorithm and size."""
    results = {}
    with netns.temporary_process_group(rank, ranks, rendezvous, namespaces):
        for codec in ("none", "fp16", "int8"):
            for algorithm in ("auto", *algorithms.available("all_reduce")):
                for numel in (1, 1000, 300_001):
                    tensor = (torch.arange(numel) % 11 + rank).float()
                    collectives.all_reduce(tensor, codec=codec, algorithm=algorithm)
                    results[codec, algorithm, numel] = tensor
        info = collectives.info()
        assert (info["runtime"], info["transport"], info["hosts"]) == ("native", "sockets", 2)
    return results


def test_sums_are_right_and_equal_on_both_hosts(tmp_path: Path) -> None:
    with netns.two_hosts(10) as namespaces:
        first, second = run_ranks(reduce, 2, str(tmp_path / "meet"), namespaces, backend=None)
    assert first.keys() == second.keys()
    for (codec, algorithm, numel), tensor in first.items():
        assert torch.equal(tensor, second[codec, algorithm, numel]), (codec, algorithm, numel)
        expected = (torch.arange(numel) % 11 * 2 + 1).float()
        bound = 0.3 if codec == "int8" else 0.0
        assert (tensor - expected).abs().max() <= bound, (codec, algorithm, numel)


def times_after_a_pause(
    rank: int, ranks: int, rendezvous: str, namespaces: list[str]
) -> list[tuple[float, float]]:
    """Return when this rank began and ended each all_reduce of 1.2 MB, before each of which the link is idle."""
    tensor = torch.ones(300_000)
    taken = []
    with netns.temporary_process_group(rank, ranks, rendezvous, namespaces):
        for _ in range(5):
            dist.barrier()
            time.sleep(0.03)
            start = time.monotonic()
            collectives.all_reduce(tensor, codec="none")
            taken.append((start, time.monotonic()))
    return taken


def test_a_link_limits_what_follows_a_pause(tmp_path: Path) -> None:
    """A kernel's queue lets a burst pass; it has to be small beside the gradients of a small model."""
    with netns.two_hosts(1) as namespaces:
        taken = run_ranks(times_after_a_pause, 2, str(tmp_path / "meet"), namespaces, backend=None)
    # From the first rank's beginning to the last one's end: a rank that begins late finds its peer's data there.
    seconds = [
        max(ends) - min(starts)
        for starts, ends in (zip(*call, strict=True) for call in zip(*taken, strict=True))
    ]
    assert min(seconds) > (1.2e6 - 3 * netns.LEAST_BURST) * 8 / 1e9
