"""all_reduce of sparse COO tensors on real ranks, against torch.distributed.all_reduce on Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dtcomm
from dtcomm import algorithms
from dtcomm.errors import CollectiveMismatch
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks
from tests.unit.collectives.call_by_name import require_alike

SHAPES = [((300, 8), 1), ((20, 30), 2), ((12, 10, 4, 3), 2), ((500,), 1), ((1 << 20, 1 << 20), 2)]

#: The largest relative error of a sum of Gaussian numbers on 3 ranks, |error| / |sum|.
BOUNDS = {
    "fp16": 1e-3,
    "bf16": 8e-3,
    "fp8_e4m3": 0.08,
    "mxfp8": 0.08,
    "mxfp4": 0.4,
    "nvfp4": 0.3,
    "int8": 0.02,
    "int4": 0.3,
    "int8:rotate=hadamard": 0.02,
    "intv": 0.1,
    "exact": 1e-5,
    "topk:ratio=0.5": 0.6,
    "randk:ratio=0.5": 2.0,
    "randk:ratio=0.5,positions=shared": 2.0,
    "sign": 1.5,
    "int8/int4": 0.02,  # one host: int8
}


def contribution(
    rank: int, shape: tuple[int, ...], sparse_dim: int, entries: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a rank's tensor with so many entries, some of which are at the same place; all ranks can make it."""
    generator = torch.Generator().manual_seed(rank)
    # The lower half of each dimension, so that ranks have entries in common.
    indices = torch.stack(
        [torch.randint(max(1, size // 2), (entries,), generator=generator) for size in shape[:sparse_dim]]
    )
    values = torch.randn(entries, *shape[sparse_dim:], generator=generator)
    return torch.sparse_coo_tensor(indices, (values * 100).to(dtype), shape, check_invariants=True)


def require_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.is_sparse and result.is_coalesced()
    assert result.shape == expected.shape and result.dtype == expected.dtype
    assert torch.equal(result.indices(), expected.indices())
    assert torch.equal(result.values(), expected.values())
    require_alike(result.indices(), "indices")
    require_alike(result.values(), "values")


@on_ranks(2)
def test_sums_are_those_of_gloo_on_two_ranks(rank: int, n: int) -> None:
    for shape, sparse_dim in SHAPES:
        for dtype in (torch.float32, torch.float64, torch.int64):
            for entries in ([40 * (r + 1) for r in range(n)], [0] * (n - 1) + [7], [0] * n):
                tensor = contribution(rank, shape, sparse_dim, entries[rank], dtype)
                expected = tensor.clone()
                dist.all_reduce(expected)
                tensor_again = tensor.clone()
                dtcomm.all_reduce(tensor)
                require_equal(tensor, expected.coalesce())
                work = dtcomm.all_reduce(tensor_again, dist.ReduceOp.SUM, checksum=True, async_op=True)
                (result,) = work.get_future().wait()
                assert result is tensor_again and work.is_completed()
                assert work.wire_bytes > 0 or not any(entries)
                require_equal(result, expected.coalesce())


def compare_with_sums(rank: int, n: int) -> None:
    shape, sparse_dim = (400, 6), 1
    contributions = [contribution(r, shape, sparse_dim, 200).coalesce() for r in range(n)]
    total = torch.zeros(shape)
    for tensor in contributions:
        total += tensor.to_dense()
    union = sum(tensor.to_dense().abs() for tensor in contributions).sum(1).nonzero().flatten()

    mean = contributions[rank].clone()
    dtcomm.all_reduce(mean, "avg")
    assert torch.equal(mean.indices()[0], union)
    assert torch.equal(mean.to_dense(), total / n)
    for dtype in (torch.float16, torch.bfloat16):  # added in fp32 and rounded once
        halves = [tensor.to(dtype) for tensor in contributions]
        expected = torch.zeros(shape)
        for half in halves:
            expected += half.to_dense().float()
        result = halves[rank].clone()
        dtcomm.all_reduce(result)
        assert torch.equal(result.to_dense(), expected.to(dtype))

    order = torch.randperm(contributions[rank]._nnz(), generator=torch.Generator().manual_seed(7 + rank))
    shuffled = torch.sparse_coo_tensor(
        contributions[rank].indices()[:, order], contributions[rank].values()[order], shape
    )
    dtcomm.all_reduce(shuffled)
    assert torch.equal(shuffled.to_dense(), total)

    for algorithm in algorithms.available("all_reduce"):
        result = contributions[rank].clone()
        dtcomm.all_reduce(result, algorithm=algorithm)
        torch.testing.assert_close(result.to_dense(), total)
        require_alike(result.values(), algorithm)

    for spec, bound in BOUNDS.items():
        result = contributions[rank].clone()
        dtcomm.all_reduce(result, codec=spec)
        assert torch.equal(result.indices()[0], union), spec
        error = float((result.to_dense() - total).norm() / total.norm())
        assert error <= bound, (spec, error)
        require_alike(result.values(), spec)
    audited = contributions[rank].clone()
    dtcomm.all_reduce(audited, codec="exact", audit=True)
    torch.testing.assert_close(audited.to_dense(), total)


def refuse_unlike_tensors(rank: int, n: int) -> list[str]:
    """Return the messages of the errors; the last call, in which one rank's tensor is dense, comes last."""
    tensors = [
        torch.ones(4, 3 + rank).to_sparse(),
        torch.ones(4, 3).to_sparse(1 + rank % 2),
        torch.ones(4, 3, dtype=torch.float64 if rank else torch.float32).to_sparse(),
        torch.ones(4, 3) if rank else torch.ones(4, 3).to_sparse(),
    ]
    messages = []
    for tensor in tensors:
        with pytest.raises(CollectiveMismatch) as raised:
            dtcomm.all_reduce(tensor)
        messages.append(str(raised.value))
        if tensor is not tensors[-1]:
            usable = torch.ones(3).to_sparse()
            dtcomm.all_reduce(usable)
            assert usable.to_dense().eq(n).all()
    return messages


def compare_and_refuse(rank: int, n: int) -> list[str]:
    compare_with_sums(rank, n)
    return refuse_unlike_tensors(rank, n)


def test_codecs_algorithms_and_unlike_tensors_on_three_ranks() -> None:
    for shapes, dimensions, dtypes, layouts in run_ranks(compare_and_refuse, 3):
        assert "shape (4, 3)" in shapes and ("shape (4, 4)" in shapes or "shape (4, 5)" in shapes)
        assert "1 sparse dimensions" in dimensions and "2 sparse dimensions" in dimensions
        assert "a float32 tensor" in dtypes and "a float64 tensor" in dtypes
        assert "counts of a sparse all_reduce" in layouts
