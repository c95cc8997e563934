# ruff: noqa: E501 - a refusal a line reads as a table
"""Wrong calls are refused on every rank that makes them, name the argument, and leave the communicator usable."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

x = torch.ones(8)

REFUSED: list[tuple[type[Exception], str, Any]] = [
    (ValueError, r"codec: unknown codec 'int9' .did you mean 'int8'..; valid names: none", lambda: collectives.all_reduce(x, codec="int9")),
    (ValueError, r"algorithm: 'rings' is not one of auto, direct, ring", lambda: collectives.all_reduce(x, algorithm="rings")),
    (ValueError, r"op: 'mean' is not one of sum, avg, min, max", lambda: collectives.all_reduce(x, "mean")),
    (ValueError, r"op: .* is not one of sum", lambda: collectives.all_reduce(x, dist.ReduceOp.PRODUCT)),
    (ValueError, r"op: max is valid with", lambda: collectives.all_reduce(x, "max", codec="int8")),
    (ValueError, r"op: avg needs a floating-point tensor", lambda: collectives.all_reduce(torch.ones(3, dtype=torch.int32), "avg")),
    (TypeError, r"codec int8 takes float32", lambda: collectives.all_reduce(torch.ones(3, dtype=torch.float64), codec="int8")),
    (TypeError, r"tensor: dtype torch.complex64 is not one of", lambda: collectives.all_reduce(torch.ones(3, dtype=torch.complex64))),
    (TypeError, r"tensor: expected a torch.Tensor, got list", lambda: collectives.all_reduce([1.0])),  # type: ignore[arg-type]
    (ValueError, r"tensor: is on meta", lambda: collectives.all_reduce(torch.ones(3, device="meta"))),
    (ValueError, r"tensor: expected a dense tensor, got layout torch.sparse_coo; pass tensor.to_dense", lambda: collectives.reduce(torch.ones(3).to_sparse(), 0)),
    (ValueError, r"tensor: expected a dense tensor, got layout torch.sparse_csr", lambda: collectives.all_reduce(torch.ones(3, 3).to_sparse_csr())),
    (ValueError, r"op: max is valid with dense tensors; a sparse tensor takes sum and avg", lambda: collectives.all_reduce(torch.ones(3).to_sparse(), "max")),
    (ValueError, r"op: avg needs a floating-point tensor", lambda: collectives.all_reduce(torch.ones(3, dtype=torch.int32).to_sparse(), "avg")),
    (TypeError, r"tensor: codec int8 takes float32", lambda: collectives.all_reduce(torch.ones(3, dtype=torch.int32).to_sparse(), codec="int8")),
    (TypeError, r"tensor: dtype torch.complex64 is not one of", lambda: collectives.all_reduce(torch.ones(3, dtype=torch.complex64).to_sparse())),
    (ValueError, r"tensor: has 17 dimensions; a sparse tensor may have up to 16", lambda: collectives.all_reduce(torch.ones([1] * 17).to_sparse())),
    (ValueError, r"tensor: is on meta", lambda: collectives.all_reduce(torch.ones(3).to_sparse().to("meta"))),
    (ValueError, r"residual: error feedback is valid with dense tensors", lambda: collectives.all_reduce(torch.ones(3).to_sparse(), residual=torch.zeros(3))),
    (ValueError, r"epilogue: is valid with dense tensors", lambda: collectives.all_reduce(torch.ones(3).to_sparse(), epilogue=lambda: None)),
    (ValueError, r"audit: needs a codec whose sums are exact", lambda: collectives.all_reduce(torch.ones(3).to_sparse(), audit=True)),
    (ValueError, r"codec: 'lossless' cannot be used here", lambda: collectives.all_reduce(torch.ones(3).to_sparse(), codec="lossless")),
    (ValueError, r"algorithm: 'rings' is not one of auto, direct, ring", lambda: collectives.all_reduce(torch.ones(3).to_sparse(), algorithm="rings")),
    (TypeError, r"checksum: expected True, False or None", lambda: collectives.all_reduce(torch.ones(3).to_sparse(), checksum="yes")),  # type: ignore[arg-type]
    (ValueError, r"tensor: expected a dense, non-overlapping", lambda: collectives.all_reduce(torch.ones(10)[::2])),
    (ValueError, r"tensor: expected a dense, non-overlapping", lambda: collectives.all_reduce(torch.ones(1).expand(4))),
    (ValueError, r"src: rank 7 is not in the group; its ranks are 0, 1", lambda: collectives.broadcast(x, 7)),
    (ValueError, r"input: has 8 elements; expected world size x output = 2 x 8", lambda: collectives.reduce_scatter(torch.ones(8), x)),
    (ValueError, r"output: has 8 elements; expected world size x input = 2 x 8", lambda: collectives.all_gather(x, torch.ones(8))),
    (TypeError, r"input: is torch.float32, output is torch.float64", lambda: collectives.reduce_scatter(torch.ones(4).double(), x)),
    (ValueError, r"output: expected a contiguous", lambda: collectives.reduce_scatter(torch.ones(8)[::2], x)),
    (ValueError, r"output: overlaps the memory of input", lambda: collectives.reduce_scatter(x[1:5], x)),
    (ValueError, r"input: overlaps the memory of output", lambda: collectives.all_gather(x, x[2:6])),
    (TypeError, r"residual: expected a float32 tensor", lambda: collectives.all_reduce(x, residual=torch.ones(8).double())),
    (ValueError, r"residual: has 3 elements, the tensor 8", lambda: collectives.all_reduce(x, residual=torch.ones(3))),
    (ValueError, r"residual: overlaps", lambda: collectives.all_reduce(x, residual=x)),
    (ValueError, r"residual: error feedback is valid with sum and avg", lambda: collectives.all_reduce(x, "max", residual=torch.ones(8))),
    (TypeError, r"residual: error feedback needs a floating", lambda: collectives.all_reduce(torch.ones(8, dtype=torch.int32), residual=torch.ones(8))),
    (ValueError, r"codec: has 1 codecs for 2 tensors", lambda: collectives.all_reduce_coalesced([x, x.clone()], codec=["none"])),
    (ValueError, r"residuals: has 1 for 2", lambda: collectives.all_reduce_coalesced([x, x.clone()], residuals=[None])),
    (ValueError, r"bucket_bytes: must be", lambda: collectives.all_reduce_coalesced([x], bucket_bytes=0)),
    (TypeError, r"tensors\[1\]: expected a torch.Tensor", lambda: collectives.all_reduce_coalesced([x, None])),  # type: ignore[list-item]
    (ValueError, r"outputs: has 1 tensors, inputs 2", lambda: collectives.all_gather_coalesced([torch.ones(16)], [x, x])),
    (ValueError, r"outputs\[1\]: has 8 elements; expected world size x inputs\[1\] = 2 x 8", lambda: collectives.all_gather_coalesced([torch.ones(16), torch.ones(8)], [x, x])),
    (TypeError, r"inputs\[0\]: is torch.float32, outputs\[0\] is torch.int32", lambda: collectives.reduce_scatter_coalesced([torch.ones(4, dtype=torch.int32)], [x])),
    (ValueError, r"outputs\[0\]: overlaps the memory of inputs\[0\]", lambda: collectives.reduce_scatter_coalesced([x[2:6]], [x])),
    (ValueError, r"codec: has 1 codecs for 2 tensors", lambda: collectives.all_gather_coalesced([torch.ones(16)] * 2, [x, x], codec=["none"])),
    (TypeError, r"group: expected a ProcessGroup or None, got str", lambda: collectives.all_reduce(x, group="world")),  # type: ignore[arg-type]
]  # fmt: skip


@on_ranks(2)
def test_wrong_calls_are_refused_and_leave_the_communicator_usable(rank: int, n: int) -> None:
    for kind, pattern, call in REFUSED:
        with pytest.raises(kind, match=pattern):
            call()
        if rank == 0:  # a refused call on one rank alone does not count as a call
            with pytest.raises(kind, match=pattern):
                call()
        tensor = torch.full((100,), 1.0)
        collectives.all_reduce(tensor)
        assert tensor.eq(n).all(), pattern


def test_call_without_a_process_group_is_refused() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"group: torch.distributed is not initialised"):
        collectives.all_reduce(torch.ones(1))


def fork_and_reduce(rank: int, n: int) -> str:
    collectives.all_reduce(torch.ones(4))
    tensor = collectives.empty(1000)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            collectives.all_reduce(torch.ones(4))
            message = "no error"
        except DtcommError as error:
            message = str(error)
        os.write(write, message.encode())
        os._exit(0)
    os.close(write)
    message = os.fdopen(read).read()
    os.waitpid(child, 0)
    tensor.fill_(1.0)
    collectives.all_reduce(tensor)  # the parent goes on
    assert tensor.eq(n).all()
    return message


def test_forked_child_is_refused_and_the_parent_continues() -> None:
    for message in run_ranks(fork_and_reduce, 2, fresh=True):
        assert "forked" in message


@on_ranks(2, fresh=True)
def test_destroyed_group_is_refused(rank: int, n: int) -> None:
    tensor = torch.ones(4)
    collectives.all_reduce(tensor)
    dist.barrier()
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="not initialised"):
        collectives.all_reduce(tensor)
    with pytest.raises(ValueError, match="destroyed"):
        collectives.all_reduce(tensor, group=group)
