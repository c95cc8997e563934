"""Three hosts of 2, 1 and 1 ranks, made of network namespaces: every collective and algorithm over real links."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.common import netns
from dtcomm import algorithms, collectives
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure import exact_inputs

WHY = netns.why_unavailable()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "-")
HOST_OF = (0, 0, 1, 2)
HIERARCHIES = ("hierarchical", "hierarchical:ring/tree", "hierarchical:one_shot/ring")


def digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def all_reduce_digests(rank: int, ranks: int, numel: int) -> dict[str, int]:
    """Return digests of all_reduce by every algorithm and codec, which must be equal on all ranks."""
    digests = {}
    codecs = ("none", "int8", "topk:ratio=0.1", "exact:bits=32")
    for algorithm in ("auto", *algorithms.available("all_reduce"), *HIERARCHIES):
        levels = ("none/int4", "fp16/sign") if algorithm.startswith("hierarchical") else ()
        for codec in (*codecs, *levels):
            tensor = (torch.arange(numel) % 11 + rank).float()
            collectives.all_reduce(tensor, codec=codec, algorithm=algorithm)
            if codec in ("none", "exact:bits=32"):
                assert tensor.equal((torch.arange(numel) % 11 * ranks + 6).float()), (algorithm, codec)
            digests[f"{algorithm} {codec}"] = digest(tensor)
    return digests


def check_other_collectives(rank: int, ranks: int, numel: int) -> list[str]:
    """Run every collective by every algorithm without loss; return what is wrong, in words."""
    wrong = []
    calls: dict[str, Callable[..., Any]] = {
        "reduce_scatter": lambda source, out, algorithm: collectives.reduce_scatter(
            out, source, algorithm=algorithm
        ),
        "all_gather": lambda source, out, algorithm: collectives.all_gather(out, source, algorithm=algorithm),
        "broadcast": lambda source, out, algorithm: collectives.broadcast(
            out.copy_(source), 3, algorithm=algorithm
        ),
        "reduce": lambda source, out, algorithm: collectives.reduce(
            out.copy_(source), 3, algorithm=algorithm
        ),
        "all_to_all": lambda source, out, algorithm: collectives.all_to_all(out, source, algorithm=algorithm),
    }
    for name, call in calls.items():
        for algorithm in ("auto", *algorithms.available(name)):
            source = exact_inputs.inputs(name, numel, rank=rank, world_size=ranks)
            expected = exact_inputs.expected(name, numel, rank=rank, world_size=ranks, root=3)
            out = torch.empty(source.numel() if name in ("broadcast", "reduce") else expected.numel())
            call(source, out, algorithm)
            if expected.numel() and exact_inputs.count_mismatches(out, expected):
                wrong.append(f"{name} {algorithm}")
    return wrong


def run_on_three_hosts(
    rank: int, ranks: int, rendezvous: str, namespaces: list[str]
) -> tuple[dict[str, int], list[str]]:
    with netns.temporary_process_group(rank, ranks, rendezvous, [namespaces[host] for host in HOST_OF]):
        digests_by_size = {size: all_reduce_digests(rank, ranks, size) for size in (1, 20_000)}
        wrong = check_other_collectives(rank, ranks, 5000)
        info = collectives.info()
        assert info["runtime"] == "native" and info["hosts"] == 3, info
        assert info["transport"] == ("memory and sockets" if rank < 2 else "sockets")
        # Ranks of one host share its memory, whatever the whole group has to do.
        for members, transport in (([0, 1], "memory"), ([1, 2], "sockets")):
            group = dist.new_group(members)
            if rank in members:
                tensor = torch.full((1000,), rank + 1.0)
                collectives.all_reduce(tensor, group=group)
                assert tensor.eq(sum(member + 1 for member in members)).all()
                assert collectives.info(group)["transport"] == transport
        # Messages between hosts and inside one, around the circle.
        received = torch.empty(70_000)
        works = [
            collectives.send(torch.full((70_000,), float(rank)), (rank + 1) % ranks, async_op=True),
            collectives.recv(received, (rank - 1) % ranks, async_op=True),
        ]
        for work in works:
            work.wait()
        assert received.eq((rank - 1) % ranks).all()
        labelled_digests = {
            f"{size} {name}": value
            for size, digests in digests_by_size.items()
            for name, value in digests.items()
        }
    return labelled_digests, wrong


def test_every_collective_on_three_uneven_hosts(tmp_path: Path) -> None:
    with netns.many_hosts(3, 10) as namespaces:
        ranks = run_ranks(run_on_three_hosts, 4, str(tmp_path / "meet"), namespaces, backend=None)
    for rank, (digests, wrong) in enumerate(ranks):
        assert wrong == [], rank
        assert {name for name, value in digests.items() if value != ranks[0][0][name]} == set(), rank
