"""Random operations through torch.distributed, where the group's backend is "dtcomm"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.measure import exact_inputs
from tests.stress.random_ops import Operation

OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
COLLECTIVES = (*exact_inputs.COLLECTIVES, "barrier")


class Both:
    """The handle of a send and a receive."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for both."""
        for work in self._works:
            work.wait()


def applies(operation: Operation) -> bool:
    """Return whether torch has a call with the same meaning."""
    return operation.codec == "none" and operation.collective in COLLECTIVES and not operation.checksum


def call(operation: Operation, rank: int, members: tuple[int, ...], group: Any) -> tuple[Any, torch.Tensor]:
    """Start an operation; return its handle (None: complete) and the output."""
    n, shares, position = operation.numel, len(members), members.index(rank)
    common: dict[str, Any] = {"group": group, "async_op": operation.overlap}
    root, op = members[operation.index % shares], OPS[operation.op]
    fresh = {"dtype": operation.dtype}
    match operation.collective:
        case "barrier":
            return dist.barrier(**common), torch.empty(0)
        case "sendrecv":
            output = torch.empty(n, **fresh)
            tag = operation.index
            sent = dist.isend(operation.input(rank, n), members[(position + 1) % shares], group, tag)
            received = dist.irecv(output, members[position - 1], group, tag)
            return Both([work for work in (sent, received) if work is not None]), output
        case "reduce_scatter":
            output = torch.empty(n, **fresh)
            return dist.reduce_scatter_tensor(output, operation.input(rank, n * shares), op, **common), output
        case "all_gather":
            output = torch.empty(n * shares, **fresh)
            return dist.all_gather_into_tensor(output, operation.input(rank, n), **common), output
        case "all_to_all":
            sent_rows = operation.splits(position, shares) or [n] * shares
            rows = [(operation.splits(src, shares) or [n] * shares)[position] for src in range(shares)]
            output, input_tensor = torch.empty(sum(rows), **fresh), operation.input(rank, sum(sent_rows))
            if operation.splits(position, shares) is None:
                return dist.all_to_all_single(output, input_tensor, **common), output
            return dist.all_to_all_single(output, input_tensor, rows, sent_rows, **common), output
        case "gather":
            output = torch.empty(n * shares if rank == root else 0, **fresh)
            gathered = list(output.view(shares, n).unbind(0)) if rank == root else None
            return dist.gather(operation.input(rank, n), gathered, root, **common), output
        case "scatter":
            output = torch.empty(n, **fresh)
            shards = operation.input(root, n * shares).view(shares, n) if rank == root else None
            given_list = None if shards is None else list(shards.unbind(0))
            return dist.scatter(output, given_list, root, **common), output
    output = operation.input(rank, n)
    if operation.collective == "all_reduce":
        return dist.all_reduce(output, op, **common), output
    if operation.collective == "reduce":
        return dist.reduce(output, root, op, **common), output
    return dist.broadcast(output, root, **common), output
