"""Collectives that reduce: all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from dtcomm.codecs import Codec
from dtcomm.collectives import _sparse_tensors
from dtcomm.collectives._arguments import (
    Algorithm,
    AllReduceOptions,
    Group,
    Op,
    Options,
    in_memory,
    require_auditable,
    require_no_overlap,
    require_pair,
    require_residual,
    require_tensor,
    require_type,
)
from dtcomm.collectives._dispatch import make_plan, start
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.runtime import warm_calls
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.communicator_cache import get_communicator_for
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, Buffers, OpSpec, TensorSpec
from dtcomm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def all_reduce(
    tensor: Tensor, op: Op = "sum", *, async_op: Literal[True], **options: Unpack[AllReduceOptions]
) -> Work: ...


@overload
def all_reduce(
    tensor: Tensor, op: Op = "sum", *, async_op: bool = False, **options: Unpack[AllReduceOptions]
) -> Work | None: ...


def all_reduce(
    tensor: Tensor,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
    audit: bool = False,
    epilogue: LocalTask | None = None,
) -> Work | None:
    """Reduce a tensor over the ranks of a group, in place: every rank ends with the same bits.

    A sparse tensor becomes the coalesced sum or average of all ranks' tensors, whose entries are those that any rank
    has. The entries are exchanged exactly, as int32 or int64; the values of all of them are then summed as a dense
    tensor, [entries, dense dimensions], with ``codec``. The call waits until all ranks have made it, even with
    ``async_op``, because the ranks exchange their entries first.

    Args:
        tensor: A dense floating-point, integer or bool tensor of any shape, on the CPU or a CUDA device, with the
            same size and dtype on all ranks. It is overwritten with the result. Or a sparse COO tensor, coalesced or
            not, of up to 16 dimensions, with the same shape, sparse dimensions and dtype on all ranks and any number of
            entries on each.
        op: ``"sum"``, ``"avg"``, ``"min"`` or ``"max"``, or torch's ``ReduceOp`` of these. avg divides the fp32 sum
            once, before its final encoding. min and max are valid with codecs none, fp16 and bf16, and dense tensors.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or ``"A/B"`` with codec A
            inside hosts and B between them.
        algorithm: The algorithm's name, one of ``dtcomm.algorithms.available("all_reduce")``; ``"direct"`` for the one
            or two shots that suit the codec; ``"two_shot_symmetric"`` for two shots in which a chunk's owner encodes
            its own contribution too (fused CUDA kernels only); ``"auto"`` for the fastest by prediction or measurement;
            or a `dtcomm.schedule.Schedule`, or its text, for the ranks of the group. For a sparse tensor ``"auto"``
            means ``"direct"``, which adds in rank order in fp32 (fp64 for doubles), unless ``codec`` has two levels.
        group: The process group; None is the default group.
        async_op: If True, start the operation and return a ``Work`` at once. The tensors must not be used until the
            work is done.
        seed: The key of stochastic rounding and of random positions, the same on all ranks; None is the number of the
            call.
        residual: Error feedback: an fp32 tensor with as many elements as the tensor. It is added to this rank's
            contribution and then overwritten with the error of encoding it. None means no feedback, the only value for
            a sparse tensor.
        checksum: If True, every payload travels with its CRC32C, which the receiver verifies. None takes the value of
            the variable DTCOMM_CHECKSUM. It is the same on all ranks.
        audit: If True, the ranks check that the sum is right by checksums of their integers. Only with codec ``exact``.
            On a failure all ranks raise PayloadCorrupt, which names the elements; the tensor is then unchanged, and the
            call may be repeated.
        epilogue: A task that is applied to the sum, made by ``dtcomm.kernels.epilogue.epilogue_task`` for the same
            tensor: bias, residual stream, RMS norm. The native engine applies it to each piece of the sum as soon as
            the piece is final, while it is in the cache. Only for dense tensors.

    Returns:
        None when the result is complete, or a ``Work`` if ``async_op``.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it; nothing has been started.
        CollectiveMismatch: If the ranks call different operations, or pass sparse tensors of different shapes or dtypes
            or both sparse and dense ones.
        CollectiveTimeout: If a rank does not take part within the group's timeout.
        PeerLost: If a rank died.
        PayloadCorrupt: If a checksum does not match or the audit fails.

    Example:
        Average a gradient in 8-bit integers, with error feedback::

            residual = torch.zeros_like(gradient)  # kept from step to step
            dtcomm.all_reduce(gradient, "avg", codec="int8", residual=residual)

        Average the gradient of an ``nn.Embedding(..., sparse=True)``::

            dtcomm.all_reduce(embedding.weight.grad, "avg")
    """
    warm = None
    if seed is None and residual is None and epilogue is None and not audit:
        warm = ("all_reduce", group, tensor, tensor, op, codec, algorithm, checksum)
        if started := warm_calls.start(warm, async_op):
            return started if async_op else None
    require_type(tensor, "tensor")
    if tensor.layout is torch.sparse_coo:
        return _sparse_tensors.all_reduce(
            tensor, op, codec, algorithm, group, async_op, seed, residual, checksum, audit, epilogue
        )
    communicator = get_communicator_for(group, tensor, "tensor")
    key = ("all_reduce", tensor.numel(), tensor.dtype, op, codec, algorithm, checksum, audit)
    plan = communicator.plans.get(key)
    if plan is None:
        require_tensor(tensor, "tensor")
        if audit:
            require_auditable(codec)
        plan = make_plan(
            communicator,
            key,
            "all_reduce",
            [(tensor.numel(), tensor.dtype, codec)],
            algorithm,
            op=op,
            checksum=checksum,
            audit=audit,
        )
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        tensor = in_memory(tensor, "tensor")
    if residual is not None:
        require_residual(residual, tensor, "residual", op)
    return start(
        communicator, plan, [Buffers(tensor, tensor, residual)], [tensor], seed, async_op, epilogue, warm
    )


def supports_two_shot_symmetric(tensor: Tensor, codec: Codec, group: Group = None) -> bool:
    """Return whether ``all_reduce(tensor, codec=codec, algorithm="two_shot_symmetric")`` can run.

    Only fused kernels over peer memory encode the owner's contribution to its own chunk. All ranks get the same answer.

    Args:
        tensor: A tensor like the one to be reduced.
        codec: The codec of the messages.
        group: The process group; None is the default group.
    """
    communicator = get_communicator_for(group, tensor, "tensor")
    communicator.connect()
    return not why_no_fused_kernel(communicator, tensor.numel(), tensor.dtype, codec, TWO_SHOT_SYMMETRIC)


def why_no_fused_kernel(
    communicator: Communicator, numel: int, dtype: torch.dtype, codec: Codec, algorithm: str
) -> str:
    """Return why fused kernels do not serve a sum; empty if they do.

    Args:
        communicator: The ranks, which are connected.
        numel: Elements of the tensor.
        dtype: The dtype of the tensor.
        codec: The codec of the messages.
        algorithm: ``"one_shot"``, ``"two_shot"``, ``"two_shot_symmetric"``, or ``"direct"`` for one of the first two.
    """
    if communicator.runtime.name != "peer":
        return communicator.runtime_reason
    from dtcomm.runtime.cuda_peer.launch import why_not

    name = "two_shot" if algorithm == "direct" else algorithm
    return why_not(OpSpec("all_reduce", "sum", (TensorSpec(numel, dtype, codec),), name), communicator.size)


@overload
def reduce(
    tensor: Tensor, dst: int, op: Op = "sum", *, async_op: Literal[True], **options: Unpack[Options]
) -> Work: ...


@overload
def reduce(
    tensor: Tensor, dst: int, op: Op = "sum", *, async_op: bool = False, **options: Unpack[Options]
) -> Work | None: ...


def reduce(
    tensor: Tensor,
    dst: int,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Reduce a tensor over the ranks of a group; the result is on one of them.

    Args:
        tensor: A dense tensor with the same size and dtype on all ranks. On ``dst`` it is overwritten with the result;
            on the other ranks it is unchanged.
        dst: The global rank that gets the result.
        op: ``"sum"``, ``"avg"``, ``"min"`` or ``"max"``, or torch's ``ReduceOp`` of these. avg divides the fp32 sum
            once, before its final encoding. min and max are valid with codecs none, fp16 and bf16.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or ``"A/B"`` with codec A
            inside hosts and B between them.
        algorithm: The algorithm's name, one of ``dtcomm.algorithms.available("reduce")``; ``"direct"`` for the one or
            two shots that suit the codec; ``"auto"`` for the fastest by prediction or measurement; or a
            `dtcomm.schedule.Schedule`, or its text, for the ranks of the group.
        group: The process group; None is the default group.
        async_op: If True, start the operation and return a ``Work`` at once. The tensors must not be used until the
            work is done.
        seed: The key of stochastic rounding and of random positions, the same on all ranks; None is the number of the
            call.
        residual: Error feedback: an fp32 tensor with as many elements as the tensor. It is added to this rank's
            contribution and then overwritten with the error of encoding it. None means no feedback.
        checksum: If True, every payload travels with its CRC32C, which the receiver verifies. None takes the value of
            the variable DTCOMM_CHECKSUM. It is the same on all ranks.

    Returns:
        None when the result is complete, or a ``Work`` if ``async_op``.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it; nothing has been started.
        CollectiveMismatch: If the ranks call different operations.
        CollectiveTimeout: If a rank does not take part within the group's timeout.
        PeerLost: If a rank died.
        PayloadCorrupt: If a checksum does not match.

    Example:
        Sum the loss of all ranks on rank 0::

            dtcomm.reduce(loss, dst=0)
    """
    warm = None
    if seed is None and residual is None:
        warm = ("reduce", group, tensor, tensor, dst, op, codec, algorithm, checksum)
        if started := warm_calls.start(warm, async_op):
            return started if async_op else None
    require_type(tensor, "tensor")
    communicator = get_communicator_for(group, tensor, "tensor")
    key = ("reduce", tensor.numel(), tensor.dtype, dst, op, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        require_tensor(tensor, "tensor")
        root = communicator.group_rank(dst, "dst")
        plan = make_plan(
            communicator,
            key,
            "reduce",
            [(tensor.numel(), tensor.dtype, codec)],
            algorithm,
            op=op,
            root=root,
            checksum=checksum,
        )
    tensor = in_memory(tensor, "tensor")
    if residual is not None:
        require_residual(residual, tensor, "residual", op)
    output = tensor if communicator.ranks[communicator.rank] == dst else None
    buffers = [Buffers(tensor, output, residual)]
    return start(communicator, plan, buffers, [tensor], seed, async_op, warm=warm)


@overload
def reduce_scatter(
    output: Tensor, input: Tensor, op: Op = "sum", *, async_op: Literal[True], **options: Unpack[Options]
) -> Work: ...


@overload
def reduce_scatter(
    output: Tensor, input: Tensor, op: Op = "sum", *, async_op: bool = False, **options: Unpack[Options]
) -> Work | None: ...


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Reduce a tensor over the ranks of a group and leave each rank one shard of the result.

    Args:
        output: This rank's shard of the result, contiguous; it may be that shard of ``input``.
        input: This rank's contribution: world size shards of ``output.numel()`` elements in rank order, contiguous.
        op: ``"sum"``, ``"avg"``, ``"min"`` or ``"max"``, or torch's ``ReduceOp`` of these. avg divides the fp32 sum
            once, before its final encoding. min and max are valid with codecs none, fp16 and bf16.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or ``"A/B"`` with codec A
            inside hosts and B between them.
        algorithm: The algorithm's name, one of ``dtcomm.algorithms.available("reduce_scatter")``; ``"direct"`` for the
            one or two shots that suit the codec; ``"auto"`` for the fastest by prediction or measurement; or a
            `dtcomm.schedule.Schedule`, or its text, for the ranks of the group.
        group: The process group; None is the default group.
        async_op: If True, start the operation and return a ``Work`` at once. The tensors must not be used until the
            work is done.
        seed: The key of stochastic rounding and of random positions, the same on all ranks; None is the number of the
            call.
        residual: Error feedback: an fp32 tensor with as many elements as ``input``. It is added to this rank's
            contribution and then overwritten with the error of encoding it. None means no feedback.
        checksum: If True, every payload travels with its CRC32C, which the receiver verifies. None takes the value of
            the variable DTCOMM_CHECKSUM. It is the same on all ranks.

    Returns:
        None when the result is complete, or a ``Work`` if ``async_op``.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it; nothing has been started.
        CollectiveMismatch: If the ranks call different operations.
        CollectiveTimeout: If a rank does not take part within the group's timeout.
        PeerLost: If a rank died.
        PayloadCorrupt: If a checksum does not match.

    Example:
        Keep this rank's shard of a gradient::

            shard = torch.empty(gradient.numel() // world_size)
            dtcomm.reduce_scatter(shard, gradient, "avg", codec="int8")
    """
    warm = None
    if seed is None and residual is None:
        warm = ("reduce_scatter", group, input, output, op, codec, algorithm, checksum)
        if started := warm_calls.start(warm, async_op):
            return started if async_op else None
    communicator = get_communicator_for(group, output, "output")
    require_pair(output, input, "input", communicator.size)
    require_no_overlap(input, output, output.numel() * communicator.rank, "output", "input")
    key = ("reduce_scatter", output.numel(), output.dtype, op, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        plan = make_plan(
            communicator,
            key,
            "reduce_scatter",
            [(output.numel(), output.dtype, codec)],
            algorithm,
            op=op,
            checksum=checksum,
        )
    if residual is not None:
        require_residual(residual, input, "residual", op)
    buffers = [Buffers(input, output, residual)]
    return start(communicator, plan, buffers, [output], seed, async_op, warm=warm)
