"""Tensors in shared memory: peers read them directly, in every collective."""

from __future__ import annotations

import errno
import os
import resource
from typing import Any

import pytest
import torch

from dtcomm import collectives
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure import exact_inputs
from tests.support.rank_tests import on_ranks


@pytest.mark.parametrize("n", [2, 3, 4])
@on_ranks()
def test_reductions_read_shared_memory(rank: int, n: int) -> None:
    for count in (1, 5, 1000, 50_000, 700_001):
        for mixed in (False, True):
            # In the mixed round rank 0's tensor is an ordinary one: so all ranks must stage.
            make = torch.empty if mixed and rank == 0 else collectives.empty
            for op in ("sum", "avg"):
                tensor = make(count)
                tensor.copy_(exact_inputs.inputs("all_reduce", count, op=op, rank=rank, world_size=n))
                collectives.all_reduce(tensor, op, algorithm="two_shot")
                assert (
                    exact_inputs.count_mismatches(
                        tensor, exact_inputs.expected("all_reduce", count, op=op, rank=rank, world_size=n)
                    )
                    == 0
                )
            source = make(count * n)
            source.copy_(exact_inputs.inputs("reduce_scatter", count, rank=rank, world_size=n))
            output = torch.empty(count)
            collectives.reduce_scatter(output, source)
            assert (
                exact_inputs.count_mismatches(
                    output, exact_inputs.expected("reduce_scatter", count, rank=rank, world_size=n)
                )
                == 0
            )
            source.zero_()  # no rank reads it any more
            shard = make(count)
            shard.copy_(exact_inputs.inputs("all_gather", count, rank=rank, world_size=n))
            gathered = torch.empty(count * n)
            collectives.all_gather(gathered, shard)
            shard.zero_()
            assert (
                exact_inputs.count_mismatches(
                    gathered, exact_inputs.expected("all_gather", count, rank=rank, world_size=n)
                )
                == 0
            )
    region = collectives.empty(4, 250)
    region[:] = rank
    view = region.view(-1)[10:510]  # a part of a region
    collectives.all_reduce(view, algorithm="two_shot")
    assert view.sum().item() == 500 * n * (n - 1) / 2 and region.view(-1)[510:].eq(rank).all()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        tensor = collectives.empty(1000)
        tensor.fill_(1.0)
        collectives.all_reduce(tensor, algorithm="two_shot")
        del tensor
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert collectives.empty(2, 3, dtype=torch.int32).dtype is torch.int32
    assert collectives.empty((2, 3)).shape == (2, 3)
    assert collectives.empty(0).numel() == 0


@pytest.mark.parametrize("n", [2, 3])
@on_ranks()
def test_copying_collectives_read_shared_memory(rank: int, n: int) -> None:
    root, peer = n - 1, rank ^ 1
    for count in (1000, 50_000, 300_001):
        for mixed in (False, True):
            make = torch.empty if mixed and rank == root else collectives.empty

            def tensor_for(
                collective: str, shards: int, make: Any = make, count: int = count
            ) -> torch.Tensor:
                tensor = make(count * shards)
                return tensor.copy_(exact_inputs.inputs(collective, count, rank=rank, world_size=n))

            def check(collective: str, result: torch.Tensor, count: int = count) -> None:
                expected = exact_inputs.expected(collective, count, rank=rank, world_size=n, root=root)
                assert exact_inputs.count_mismatches(result[: expected.numel()], expected) == 0, (
                    collective,
                    count,
                )

            tensor = tensor_for("broadcast", 1)
            collectives.broadcast(tensor, root)
            check("broadcast", tensor)
            tensor = tensor_for("reduce", 1)
            collectives.reduce(tensor, root)
            check("reduce", tensor)
            for collective in ("gather", "scatter", "all_to_all"):
                source = tensor_for(collective, 1 if collective == "gather" else n)
                output = torch.empty(count if collective == "scatter" else count * n)
                if collective == "gather":
                    collectives.gather(source, output if rank == root else None, root)
                elif collective == "scatter":
                    collectives.scatter(output, source if rank == root else None, root)
                else:
                    collectives.all_to_all(output, source)
                source.zero_()  # no rank reads it any more
                check(collective, output)
            if peer < n:
                source, output = tensor_for("sendrecv", 1), torch.empty(count)
                for sends in (rank < peer, rank > peer):
                    if sends:
                        collectives.send(source, peer)
                    else:
                        collectives.recv(output, peer)
                source.zero_()
                expected = exact_inputs.inputs("sendrecv", count, rank=peer, world_size=n)
                assert exact_inputs.count_mismatches(output, expected) == 0


def allocate_without_descriptors(rank: int, n: int) -> int | None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="memfd_create") as caught:
            collectives.empty(10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return caught.value.errno


def test_empty_raises_what_the_system_says() -> None:
    assert run_ranks(allocate_without_descriptors, 1) == [errno.EMFILE]
