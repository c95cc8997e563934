"""Any collective by its name, and whether all ranks hold the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives


def call(name: str, given: torch.Tensor, n: int, **options: Any) -> torch.Tensor:
    """The collective on ``given``; its output."""
    root = dist.get_rank() == 0
    if name in ("all_reduce", "broadcast", "reduce"):
        output = given.clone()
        positional = () if name == "all_reduce" else (0,)
        getattr(collectives, name)(output, *positional, **options)
        return output if root or name != "reduce" else output[:0]
    size = {"reduce_scatter": given.numel() // n, "scatter": given.numel() // n, "all_to_all": given.numel()}
    output = torch.empty(size.get(name, given.numel() * n), dtype=given.dtype)
    if name == "gather":
        collectives.gather(given, output if root else None, **options)
        return output if root else output[:0]
    if name == "scatter":
        collectives.scatter(output, given if root else None, **options)
        return output
    getattr(collectives, name)(output, given, **options)
    return output


def require_alike(tensor: torch.Tensor, what: object) -> None:
    """All ranks hold the same bits."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert len(set(gathered)) == 1, what
