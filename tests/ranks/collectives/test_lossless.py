"""The codec of variable length in the collectives that copy, and its refusal in all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtcomm
from dtcomm import collectives
from dtcomm.errors import CollectiveMismatch
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

OVER_GLOO = {"DTCOMM_RUNTIME": "process_group"}
DTYPES = (torch.bfloat16, torch.float32)


def tensor_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights on even ranks, and bits that do not shrink on odd ones, so that lengths differ."""
    generator = torch.Generator().manual_seed(rank)
    if rank % 2 == 0:
        return torch.randn(numel, generator=generator).mul(0.02).to(dtype)
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator)
    return bits.to({2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bits are equal: those of NaNs too."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def copy_everything(rank: int, n: int, dtype: torch.dtype, numel: int) -> None:
    """Run each collective that copies, and compare every bit with what the ranks contributed."""
    own, of = tensor_of(rank, numel, dtype), [tensor_of(r, numel, dtype) for r in range(n)]
    codec = "lossless"
    whole = torch.zeros(n * numel, dtype=dtype)
    for algorithm in ("auto", "ring"):
        assert collectives.all_gather(whole, own, codec=codec, algorithm=algorithm, checksum=True) is None
        assert same(whole, torch.cat(of))
        whole.zero_()
    for root in range(n):
        tensor = own.clone()
        collectives.broadcast(tensor, root, codec=codec)
        assert same(tensor, of[root])
        flat = torch.zeros(n * numel, dtype=dtype) if rank == root else None
        collectives.gather(own, flat, root, codec=codec)
        listed = [torch.zeros(numel, dtype=dtype) for _ in range(n)] if rank == root else None
        collectives.gather(own, listed, root, codec=dtcomm.codec(codec))
        if flat is not None and listed is not None:
            assert same(flat, torch.cat(of)) and all(map(same, listed, of))
        shard = torch.zeros(numel, dtype=dtype)
        collectives.scatter(shard, of if rank == root else None, root, codec=codec)
        assert same(shard, own)
    # Shard i of a rank goes to rank i; with splits, rank r has r + 1 rows of 7 for each.
    exchanged = torch.zeros(n * numel, dtype=dtype)
    collectives.all_to_all(exchanged, own.repeat(n), codec=codec)
    assert same(exchanged, torch.cat(of))
    rows = [r + 1 for r in range(n)]
    source = tensor_of(rank, n * (rank + 1) * 7, dtype).view(-1, 7)
    output = torch.zeros(sum(rows), 7, dtype=dtype)
    collectives.all_to_all(output, source, rows, [rank + 1] * n, codec=codec)
    parts = [tensor_of(r, n * (r + 1) * 7, dtype).view(n, r + 1, 7)[rank].reshape(-1) for r in range(n)]
    assert same(output, torch.cat(parts))
    received = torch.zeros(numel, dtype=dtype)
    if rank % 2 == 0 and rank + 1 < n:
        collectives.send(own, rank + 1, codec=codec)
        collectives.recv(received, rank + 1, codec=codec)
        assert same(received, of[rank + 1])
    elif rank % 2 == 1:
        collectives.recv(received, rank - 1, codec=codec)
        collectives.send(own, rank - 1, codec=codec)
        assert same(received, of[rank - 1])


REFUSED: list[tuple[type[Exception], str, Any]] = [
    (
        ValueError,
        "cannot be used here .all_reduce.: the length of its payloads depends on the data",
        "all_reduce",
    ),
    (ValueError, "cannot be used here .reduce.", "reduce"),
    (ValueError, "cannot be used here .reduce_scatter.", "reduce_scatter"),
    (ValueError, "cannot be used here .all_gather.", "all_gather_coalesced"),
    (ValueError, "async_op: codec 'lossless' has no asynchronous form", "async"),
    (ValueError, "residual: codec 'lossless' loses nothing", "residual"),
    (ValueError, "codec: 'lossless/int8' has two levels", "levels"),
    (TypeError, "codec lossless takes float32, bfloat16, got float16", "dtype"),
]


def call(what: str, n: int) -> None:
    x, whole = torch.ones(8), torch.ones(8 * n)
    if what == "all_reduce":
        collectives.all_reduce(x, codec="lossless")
    elif what == "reduce":
        collectives.reduce(x, 0, codec="lossless")
    elif what == "reduce_scatter":
        collectives.reduce_scatter(x, whole, codec="lossless")
    elif what == "all_gather_coalesced":
        collectives.all_gather_coalesced([whole], [x], codec="lossless")
    elif what == "async":
        collectives.broadcast(x, 0, codec="lossless", async_op=True)
    elif what == "residual":
        collectives.broadcast(x, 0, codec="lossless", residual=torch.zeros(8))
    elif what == "levels":
        collectives.all_gather(whole, x, codec="lossless/int8")
    else:
        collectives.all_gather(whole.half(), x.half(), codec="lossless")


@on_ranks(2)
def test_other_operations_refuse_it_with_the_reason(rank: int, n: int) -> None:
    for error, message, what in REFUSED:
        with pytest.raises(error, match=message):
            call(what, n)
    total = torch.ones(4)
    collectives.all_reduce(total)  # the communicator is as before
    assert total.eq(n).all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_bit_arrives(ranks: int) -> None:
    for dtype in DTYPES:
        for numel in (1, 5000):
            run_ranks(copy_everything, ranks, dtype, numel)


def test_every_bit_arrives_over_gloo() -> None:
    run_ranks(copy_everything, 2, torch.bfloat16, 4097, env=OVER_GLOO)


def copy_other_sizes(rank: int, n: int, kind: str) -> str:
    """Call with another number of elements on rank 1; the source or sender is rank 0."""
    numel = 100 if rank == 0 else 10
    x = torch.ones(numel)
    with pytest.raises(CollectiveMismatch) as error:
        if kind == "broadcast":
            collectives.broadcast(x, 0, codec="lossless")
        else:
            collectives.scatter(x, torch.ones(n * numel) if rank == 0 else None, 0, codec="lossless")
    collectives.all_reduce(x[:10])  # no rank waits for payloads, so the communicator is as before
    assert x[:10].eq(n).all()
    return str(error.value)


@pytest.mark.parametrize("kind", ["broadcast", "scatter"])
def test_the_source_raises_as_well(kind: str) -> None:
    first, second = run_ranks(copy_other_sizes, 2, kind)
    assert first == "rank 1 of the group has 10 elements of torch.float32, this rank has 100"
    assert second == "rank 0 of the group has 100 elements of torch.float32, this rank has 10"


def exchange_other_sizes(rank: int, n: int) -> str:
    x = torch.ones(110)
    sent = [100, 10]
    received = [100, 100] if rank == 0 else [9, 10]  # rank 0 sends 10 elements to rank 1
    with pytest.raises(CollectiveMismatch) as error:
        collectives.all_to_all(torch.ones(sum(received)), x, received, sent, codec="lossless")
    collectives.all_reduce(x)
    assert x.eq(n).all()
    return str(error.value)


def test_both_ends_of_an_exchange_raise() -> None:
    first, second = run_ranks(exchange_other_sizes, 2)
    assert first == "rank 1 of the group expects 9 elements of torch.float32, this rank sends 10"
    assert second == "rank 0 of the group sends 10 elements of torch.float32, this rank expects 9"


def gather_other_sizes(rank: int, n: int) -> str:
    x = torch.ones(100 if rank == 0 else 10)
    with pytest.raises(CollectiveMismatch) as error:
        collectives.all_gather(torch.ones(n * x.numel()), x, codec="lossless")
    collectives.all_reduce(x[:10])  # no rank waits for payloads, so the communicator is as before
    assert x[:10].eq(n).all()
    return str(error.value)


def test_all_ranks_name_the_rank_that_has_another_size() -> None:
    first, second = run_ranks(gather_other_sizes, 2)
    assert first == "rank 1 of the group sends 10 elements of torch.float32, this rank expects 100"
    assert second == "rank 0 of the group sends 100 elements of torch.float32, this rank expects 10"
