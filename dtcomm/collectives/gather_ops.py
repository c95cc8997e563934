"""Collectives that hand on what is there: all_gather, broadcast, gather, scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch

from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import (
    Group,
    Options,
    in_memory,
    require_apart,
    require_contiguous,
    require_pair,
    require_residual,
    require_shards,
    require_tensor,
    require_type,
)
from dtcomm.collectives._dispatch import Algorithm, plan_for, start
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.communicator_cache import get_communicator_for
from dtcomm.runtime.types import Buffers
from dtcomm.runtime.work import ChainedWork, Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

Shards = torch.Tensor | Sequence[torch.Tensor]


@overload
def all_gather(
    output: torch.Tensor, input: torch.Tensor, *, async_op: Literal[True], **options: Unpack[Options]
) -> Work: ...


@overload
def all_gather(
    output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, **options: Unpack[Options]
) -> Work | None: ...


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Gather every rank's ``input`` into ``output``, in rank order; both contiguous.

    With a lossy codec a rank's own shard in ``output`` holds the decoded values too; ``input`` is left as it
    is, unless it is that part of ``output``.
    """
    communicator = get_communicator_for(group, output, "output")
    require_pair(output, input, "output", communicator.size)
    require_apart(output, input, input.numel() * communicator.rank, "input", "output")
    key = ("all_gather", input.numel(), input.dtype, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        plan = plan_for(
            communicator,
            key,
            "all_gather",
            "sum",
            [input.numel()],
            [input.dtype],
            [codec],
            algorithm,
            checksum=checksum,
        )
    if residual is not None:
        require_residual(residual, input, "residual")
    return start(communicator, plan, [Buffers(input, output, residual)], [output], seed, async_op)


@overload
def broadcast(
    tensor: torch.Tensor, src: int, *, async_op: Literal[True], **options: Unpack[Options]
) -> Work: ...


@overload
def broadcast(
    tensor: torch.Tensor, src: int, *, async_op: bool = False, **options: Unpack[Options]
) -> Work | None: ...


def broadcast(
    tensor: torch.Tensor,
    src: int,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Copy the tensor of ``src`` (a global rank) to every rank of the group.

    With a lossy codec the source ends with the decoded values too, so that all ranks hold the same.
    """
    require_type(tensor, "tensor")
    communicator = get_communicator_for(group, tensor, "tensor")
    key = ("broadcast", tensor.numel(), tensor.dtype, src, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        require_tensor(tensor, "tensor")
        root = communicator.group_rank(src, "src")
        plan = plan_for(
            communicator,
            key,
            "broadcast",
            "sum",
            [tensor.numel()],
            [tensor.dtype],
            [codec],
            algorithm,
            root,
            checksum=checksum,
        )
    tensor = in_memory(tensor, "tensor")
    if residual is not None:
        require_residual(residual, tensor, "residual")
    return start(communicator, plan, [Buffers(tensor, tensor, residual)], [tensor], seed, async_op)


@overload
def gather(
    tensor: torch.Tensor,
    gather_list: Shards | None = None,
    dst: int = 0,
    *,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work: ...


@overload
def gather(
    tensor: torch.Tensor,
    gather_list: Shards | None = None,
    dst: int = 0,
    *,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None: ...


def gather(
    tensor: torch.Tensor,
    gather_list: Shards | None = None,
    dst: int = 0,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Gather every rank's ``tensor`` on ``dst`` (a global rank), where ``gather_list`` takes them in rank order.

    ``gather_list`` is a list of one tensor a rank, or, which saves a copy, one tensor that holds them all; None
    on the other ranks. The destination's own shard is never sent, so it arrives as it is with every codec.
    """
    communicator = get_communicator_for(group, tensor, "tensor")
    require_tensor(tensor, "tensor")
    require_contiguous(tensor, "tensor")
    root = communicator.group_rank(dst, "dst")
    output = None
    if _is_root(communicator, root, gather_list, "gather_list", "dst"):
        assert gather_list is not None
        require_shards(gather_list, tensor, "gather_list", communicator.size)
        output = _flat(gather_list, tensor, communicator.size)
        require_apart(output, tensor, tensor.numel() * root, "tensor", "gather_list")
    key = ("gather", tensor.numel(), tensor.dtype, root, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        plan = plan_for(
            communicator,
            key,
            "gather",
            "sum",
            [tensor.numel()],
            [tensor.dtype],
            [codec],
            algorithm,
            root,
            checksum=checksum,
        )
    if residual is not None:
        require_residual(residual, tensor, "residual")
    outputs = [] if gather_list is None else _listed(gather_list)
    work = start(communicator, plan, [Buffers(tensor, output, residual)], outputs, seed, async_op)
    if output is None or output is gather_list:
        return work

    def deal() -> None:
        for shard, arrived in zip(outputs, output.view(len(outputs), -1), strict=True):
            shard.copy_(arrived.view_as(shard))

    if work is not None:
        return ChainedWork(work, deal, outputs)
    deal()
    return None


@overload
def scatter(
    tensor: torch.Tensor,
    scatter_list: Shards | None = None,
    src: int = 0,
    *,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work: ...


@overload
def scatter(
    tensor: torch.Tensor,
    scatter_list: Shards | None = None,
    src: int = 0,
    *,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None: ...


def scatter(
    tensor: torch.Tensor,
    scatter_list: Shards | None = None,
    src: int = 0,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Give every rank its shard of what ``src`` (a global rank) has in ``scatter_list``; it ends in ``tensor``.

    ``scatter_list`` is a list of one tensor a rank, or, which saves a copy, one tensor that holds them all; None
    on the other ranks. ``residual``, on the source, is as large as all shards together. The source's own shard is
    never sent, so it arrives as it is with every codec.
    """
    communicator = get_communicator_for(group, tensor, "tensor")
    require_tensor(tensor, "tensor")
    require_contiguous(tensor, "tensor")
    root = communicator.group_rank(src, "src")
    given = None
    if _is_root(communicator, root, scatter_list, "scatter_list", "src"):
        assert scatter_list is not None
        require_shards(scatter_list, tensor, "scatter_list", communicator.size)
        if isinstance(scatter_list, torch.Tensor):
            given = scatter_list
        else:
            given = torch.cat([shard.reshape(-1) for shard in scatter_list])
        require_apart(given, tensor, tensor.numel() * root, "tensor", "scatter_list")
    key = ("scatter", tensor.numel(), tensor.dtype, root, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        plan = plan_for(
            communicator,
            key,
            "scatter",
            "sum",
            [tensor.numel()],
            [tensor.dtype],
            [codec],
            algorithm,
            root,
            checksum=checksum,
        )
    if residual is not None:
        if given is None:
            raise ValueError("residual: only the source of a scatter encodes anything; pass None elsewhere")
        require_residual(residual, given, "residual")
    return start(communicator, plan, [Buffers(given, tensor, residual)], [tensor], seed, async_op)


def _is_root(communicator: Communicator, root: int, shards: Shards | None, argument: str, role: str) -> bool:
    if communicator.rank != root:
        if shards is not None:
            raise ValueError(f"{argument}: only {role}, rank {communicator.ranks[root]}, has one; pass None")
        return False
    if shards is None:
        raise ValueError(f"{argument}: {role} has to give one, a tensor for every rank")
    return True


def _flat(shards: Shards, like: torch.Tensor, ranks: int) -> torch.Tensor:
    if isinstance(shards, torch.Tensor):
        return shards
    return torch.empty(like.numel() * ranks, dtype=like.dtype, device=like.device)


def _listed(shards: Shards) -> list[torch.Tensor]:
    return [shards] if isinstance(shards, torch.Tensor) else list(shards)
