"""reduce, gather, scatter, all_to_all, barrier on processes: torch's semantics, lists, splits, feedback."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtcomm import algorithms, collectives
from dtcomm.codecs import codec
from dtcomm.errors import CollectiveMismatch
from dtcomm.launch.ranks import run_ranks

OVER_GLOO = {"DTCOMM_RUNTIME": "process_group"}


def gather_and_scatter_lists(rank: int, n: int) -> None:
    """Call gather and scatter with lists of tensors and in place, sync and async."""
    for root in range(n):
        for asynchronous in (False, True):
            shard = torch.full((3, 40), float(rank))
            gathered = [torch.zeros(3, 40) for _ in range(n)] if rank == root else None
            work = collectives.gather(shard, gathered, dst=root, async_op=asynchronous)
            assert (work is not None) == asynchronous
            if work is not None:
                assert len(work.get_future().wait()) == len(gathered or ())
                work.wait()
                assert work.is_completed() and work.wire_bytes >= 0 and work.seconds >= 0
            for src, tensor in enumerate(gathered or ()):
                assert tensor.eq(src).all()
            shards = [torch.full((3, 40), float(10 * root + r)) for r in range(n)] if rank == root else None
            work = collectives.scatter(shard, shards, src=root, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert shard.eq(10 * root + rank).all()
        total = torch.full((500,), float(rank + 1))
        collectives.reduce(total, root, "avg", codec="int8")
        assert (total - (n + 1) / 2).abs().max() < 0.05 if rank == root else total.eq(rank + 1).all()
    buffer = torch.arange(float(4 * n))
    shard = buffer[4 * rank : 4 * rank + 4]
    collectives.gather(shard, buffer if rank == 0 else None)  # in place
    collectives.scatter(shard, buffer if rank == 0 else None)
    assert torch.equal(shard, torch.arange(4.0 * rank, 4.0 * rank + 4))


def compare_exchanges(rank: int, n: int) -> None:
    """Compare all_to_all of equal and unequal shards with torch's own for lossless codecs."""
    generator = torch.Generator().manual_seed(7)
    for step in range(12):
        rows = torch.randint(0, 60, (n, n), generator=generator)
        if step == 5:
            rows.zero_()
        source = torch.randn(int(rows[rank].sum()), 17)
        output = torch.full((int(rows[:, rank].sum()), 17), torch.nan)
        expected = output.clone()
        sizes = rows[:, rank].tolist(), rows[rank].tolist()
        dist.all_to_all_single(expected, source, *sizes)
        work = collectives.all_to_all(output, source, *sizes, async_op=step % 2 == 0)
        if work is not None:
            work.wait()
        assert torch.equal(output, expected)
        residual = torch.zeros_like(source)
        lossy = torch.full_like(output, torch.nan)
        collectives.all_to_all(lossy, source, *sizes, codec="int8", residual=residual)
        assert torch.allclose(lossy, expected, atol=0.05)
        back = torch.empty_like(source)
        collectives.all_to_all(back, lossy, *sizes[::-1])  # what arrived comes back unchanged
        assert torch.allclose(back + residual, source, atol=1e-6)
    source, output, expected = torch.randn(n * 300), torch.empty(n * 300), torch.empty(n * 300)
    dist.all_to_all_single(expected, source)
    for algorithm in ("auto", "direct", "one_shot", "tree"):
        output.fill_(torch.nan)
        collectives.all_to_all(output, source, algorithm=algorithm)
        assert torch.equal(output, expected), algorithm
    numbers = torch.arange(n) + 10 * rank
    collectives.all_to_all(
        received := torch.empty_like(numbers), numbers, [1] * n
    )  # one side may be left out
    assert torch.equal(received, torch.arange(n) * 10 + rank)
    wrong = [2] * n if rank == 0 else [1] * n
    with pytest.raises(CollectiveMismatch, match=r"rank 0 sends 2 elements to rank \d, which expects 1"):
        collectives.all_to_all(
            torch.empty(n + (rank == 0)), torch.ones(sum(wrong)), [1] * (n - 1) + [1 + (rank == 0)], wrong
        )
    collectives.all_to_all(output, source)  # all ranks refused the call, so the communicator stays usable
    assert torch.equal(output, expected)


def check_barriers(rank: int, n: int) -> None:
    for late_rank in range(n):
        if rank == late_rank:
            time.sleep(0.05)
        arrived = time.monotonic()  # one clock for all processes
        work = collectives.barrier(async_op=late_rank % 2 == 1)
        if work is not None:
            work.wait()
        times: list[Any] = [None] * n
        dist.all_gather_object(times, (arrived, time.monotonic()))
        assert max(arrived for arrived, _ in times) <= min(departed for _, departed in times)


def check_all(rank: int, n: int) -> str:
    gather_and_scatter_lists(rank, n)
    compare_exchanges(rank, n)
    check_barriers(rank, n)
    return str(collectives.info()["runtime"])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_rooted_collectives_on_the_native_engine(n: int) -> None:
    assert run_ranks(check_all if n > 1 else gather_and_scatter_lists, n)[0] in ("native", None)


def test_rooted_collectives_over_gloo() -> None:
    assert run_ranks(check_all, 3, env=OVER_GLOO) == ["process_group"] * 3


def compare_on_two_hosts(rank: int, n: int) -> list[Any]:
    """Return results of hierarchies on two hosts of different sizes; check sums, residuals and wire bytes."""
    results: list[Any] = [collectives.info()["hosts"]]
    for algorithm in ("hierarchical", "hierarchical:ring/tree", "halving", "double_tree", "auto"):
        for spec in ("none", "int8", "fp16", "none/int8", "fp16/int8:block=4096", "int8/none"):
            if "/" in spec and not algorithm.startswith(("hier", "auto")):
                continue
            tensor = torch.arange(5000.0) % 128 + rank
            collectives.all_reduce(tensor, codec=spec, algorithm=algorithm)
            if spec == "none":
                assert torch.equal(tensor, (torch.arange(5000.0) % 128) * n + n * (n - 1) / 2), algorithm
            assert (tensor - (torch.arange(5000.0) % 128) * n).abs().max() < n * n
            results.append(tensor.view(torch.uint8).numpy().tobytes())
    for spec in ("none/int8", "int8/int8:round=stochastic", "fp16/none"):
        for op, divisor in (("sum", 1), ("avg", n)):
            residual, contribution = torch.randn(9000), torch.randn(9000)
            expected, tensor = contribution.double() + residual.double(), contribution.clone()
            work = collectives.all_reduce(tensor, op, codec=spec, residual=residual, async_op=True)
            work.wait()
            results.append(tensor.numpy().tobytes())
            lost = residual.double()
            dist.all_reduce(expected)
            dist.all_reduce(lost)
            assert (tensor.double() * divisor + lost - expected).abs().max() < 1e-4, (spec, op)
    schedule = algorithms.build("hierarchical", "all_reduce", n, hosts=((0, 2), (1,)))
    inside, between = codec("none"), codec("int8")
    work = collectives.all_reduce(torch.randn(8192), codec="none/int8", async_op=True)
    work.wait()
    assert work.wire_bytes == schedule.bytes_on_wire(8192, [inside, between])[rank]
    with pytest.raises(
        ValueError, match="codec: none/int8 names a codec for each level, and ring has no levels"
    ):
        collectives.all_reduce(torch.ones(8), codec="none/int8", algorithm="ring")
    return results


def test_hierarchies_over_interleaved_hosts() -> None:
    # Ranks 0 and 2 on one host, 1 on another.
    results = run_ranks(_named_hosts, 3, env=OVER_GLOO)
    assert results[0][0] == 2
    assert results[0] == results[1] == results[2]


def _named_hosts(rank: int, n: int) -> list[Any]:
    import os

    os.environ["DTCOMM_HOST_ID"] = "ab"[rank % 2]
    try:
        return compare_on_two_hosts(rank, n)
    finally:
        del os.environ["DTCOMM_HOST_ID"]
        collectives.release()
