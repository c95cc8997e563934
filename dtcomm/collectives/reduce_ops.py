"""Collectives that add up: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch

from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import (
    Group,
    Op,
    Options,
    in_memory,
    require_apart,
    require_auditable,
    require_pair,
    require_residual,
    require_tensor,
    require_type,
)
from dtcomm.collectives._dispatch import Algorithm, plan_for, start
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.runtime.communicator_cache import get_communicator_for
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, Buffers, OpSpec, TensorSpec
from dtcomm.runtime.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    *,
    async_op: Literal[True],
    audit: bool = False,
    epilogue: LocalTask | None = None,
    **options: Unpack[Options],
) -> Work: ...


@overload
def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    *,
    async_op: bool = False,
    audit: bool = False,
    epilogue: LocalTask | None = None,
    **options: Unpack[Options],
) -> Work | None: ...


def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
    audit: bool = False,
    epilogue: LocalTask | None = None,
) -> Work | None:
    """Reduce ``tensor`` in place over the ranks of the group: sum, avg, min or max.

    ``avg`` divides the fp32 sum once, before its final encoding; min and max take codecs none, fp16 and bf16.

    ``audit`` (codec ``exact`` alone): the checksums of the ranks' integers must add up to the result's. Otherwise all
    ranks raise PayloadCorrupt, which names the elements; the tensor is then as it was, and the call may be repeated.

    ``epilogue`` (``dtcomm.kernels.epilogue.epilogue_task`` of the same tensor) is applied to the sum. The native engine
    applies it to each piece as soon as that piece is final, while it is in the cache.
    """
    require_type(tensor, "tensor")
    communicator = get_communicator_for(group, tensor, "tensor")
    key = ("all_reduce", tensor.numel(), tensor.dtype, op, codec, algorithm, checksum, audit)
    plan = communicator.plans.get(key)
    if plan is None:
        require_tensor(tensor, "tensor")
        if audit:
            require_auditable(codec)
        plan = plan_for(
            communicator,
            key,
            "all_reduce",
            op,
            [tensor.numel()],
            [tensor.dtype],
            [codec],
            algorithm,
            checksum=checksum,
            audit=audit,
        )
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        tensor = in_memory(tensor, "tensor")
    if residual is not None:
        require_residual(residual, tensor, "residual", op)
    return start(communicator, plan, [Buffers(tensor, tensor, residual)], [tensor], seed, async_op, epilogue)


def supports_two_shot_symmetric(tensor: torch.Tensor, codec: Codec, group: Group = None) -> bool:
    """Return whether ``all_reduce(tensor, codec=codec, algorithm="two_shot_symmetric")`` can run.

    Only fused kernels over peer memory encode the owner's contribution to its own chunk. All ranks get the same answer.
    """
    communicator = get_communicator_for(group, tensor, "tensor")
    if communicator.runtime.name != "peer":
        return False
    from dtcomm.runtime.cuda_peer.launch import why_not

    shape = OpSpec(
        "all_reduce", "sum", (TensorSpec(tensor.numel(), tensor.dtype, codec),), TWO_SHOT_SYMMETRIC
    )
    return not why_not(shape, communicator.size)


@overload
def reduce(
    tensor: torch.Tensor, dst: int, op: Op = "sum", *, async_op: Literal[True], **options: Unpack[Options]
) -> Work: ...


@overload
def reduce(
    tensor: torch.Tensor, dst: int, op: Op = "sum", *, async_op: bool = False, **options: Unpack[Options]
) -> Work | None: ...


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Reduce ``tensor`` over the ranks, in place on ``dst`` (a global rank); on the others it stays as it is."""
    require_type(tensor, "tensor")
    communicator = get_communicator_for(group, tensor, "tensor")
    key = ("reduce", tensor.numel(), tensor.dtype, dst, op, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        require_tensor(tensor, "tensor")
        root = communicator.group_rank(dst, "dst")
        plan = plan_for(
            communicator,
            key,
            "reduce",
            op,
            [tensor.numel()],
            [tensor.dtype],
            [codec],
            algorithm,
            root,
            checksum=checksum,
        )
    tensor = in_memory(tensor, "tensor")
    if residual is not None:
        require_residual(residual, tensor, "residual", op)
    output = tensor if communicator.ranks[communicator.rank] == dst else None
    return start(communicator, plan, [Buffers(tensor, output, residual)], [tensor], seed, async_op)


@overload
def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = "sum",
    *,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work: ...


@overload
def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = "sum",
    *,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None: ...


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Reduce ``input`` over the ranks and leave this rank's shard in ``output``.

    ``input`` holds world size shards of ``output.numel()`` elements, in rank order; both contiguous.
    """
    communicator = get_communicator_for(group, output, "output")
    require_pair(output, input, "input", communicator.size)
    require_apart(input, output, output.numel() * communicator.rank, "output", "input")
    key = ("reduce_scatter", output.numel(), output.dtype, op, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        plan = plan_for(
            communicator,
            key,
            "reduce_scatter",
            op,
            [output.numel()],
            [output.dtype],
            [codec],
            algorithm,
            checksum=checksum,
        )
    if residual is not None:
        require_residual(residual, input, "residual", op)
    return start(communicator, plan, [Buffers(input, output, residual)], [output], seed, async_op)
