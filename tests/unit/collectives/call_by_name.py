"""Helpers for tests of all collectives: call one by its name, and compare the results of all ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives


def call(name: str, input: torch.Tensor, ranks: int, **options: Any) -> torch.Tensor:
    """Call the collective with input ``input`` and return its output."""
    root = dist.get_rank() == 0
    if name in ("all_reduce", "broadcast", "reduce"):
        output = input.clone()
        positional = () if name == "all_reduce" else (0,)
        getattr(collectives, name)(output, *positional, **options)
        return output if root or name != "reduce" else output[:0]
    size = {
        "reduce_scatter": input.numel() // ranks,
        "scatter": input.numel() // ranks,
        "all_to_all": input.numel(),
    }
    output = torch.empty(size.get(name, input.numel() * ranks), dtype=input.dtype)
    if name == "gather":
        collectives.gather(input, output if root else None, **options)
        return output if root else output[:0]
    if name == "scatter":
        collectives.scatter(output, input if root else None, **options)
        return output
    getattr(collectives, name)(output, input, **options)
    return output


def require_alike(tensor: torch.Tensor, context: object) -> None:
    """Assert that all ranks hold the same bits."""
    gathered: list[Any] = [None] * dist.get_world_size()
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    dist.all_gather_object(gathered, hashlib.sha256(data).digest())
    assert len(set(gathered)) == 1, context
