"""Collectives that reduce: all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from dtcomm.codecs import Codec
from dtcomm.collectives import sparse
from dtcomm.collectives._call import Call, run
from dtcomm.collectives._options import Algorithm, Group, Op, Options, documented
from dtcomm.collectives.checks import in_memory, require_no_overlap, require_pair
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.runtime.communicator import get_communicator_for
from dtcomm.runtime.plans import run_repeated
from dtcomm.work import Work


@documented()
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
        algorithm: The algorithm's name, one of ``dtcomm.algorithms.available("all_reduce")``; ``"direct"`` for one-shot
            or two-shot, as suits the codec; ``"auto"`` for the fastest by prediction or measurement. With
            ``"two_shot_symmetric"`` a chunk's owner encodes its own contribution too (fused CUDA kernels only). Or a
            `dtcomm.schedule.Schedule`, or its text, for the ranks of the group. For a sparse tensor ``"auto"`` means
            ``"direct"``, which adds in rank order in fp32 (fp64 for doubles), unless ``codec`` has two levels.
        audit: If True, the ranks check that the sum is right by checksums of their integers. Only with codec ``exact``.
            On a failure all ranks raise PayloadCorrupt, which names the elements; the tensor is then unchanged, and the
            call may be repeated.
        epilogue: A task that is applied to the sum, made by ``dtcomm.kernels.epilogue.epilogue_task`` for the same
            tensor: bias, residual stream, RMS norm. The native engine applies it to each piece of the sum as soon as
            the piece is final, while it is in the cache. Only for dense tensors.

    Example:
        Average a gradient in 8-bit integers, with error feedback::

            residual = torch.zeros_like(gradient)  # kept from step to step
            dtcomm.all_reduce(gradient, "avg", codec="int8", residual=residual)

        Average the gradient of an ``nn.Embedding(..., sparse=True)``::

            dtcomm.all_reduce(embedding.weight.grad, "avg")
    """
    repeated = (group, tensor, tensor, "all_reduce", op, codec, algorithm, checksum, audit)
    if (work := run_repeated(repeated, async_op, seed, residual, epilogue)) is not False:
        return work
    options = Options(codec, algorithm, group, async_op, seed, residual, checksum, audit, epilogue)
    if getattr(tensor, "layout", None) is torch.sparse_coo:
        return sparse.all_reduce(tensor, op, options)
    communicator = get_communicator_for(group, tensor, "tensor")
    memory = in_memory(tensor, "tensor")
    return run(communicator, Call("all_reduce", memory, memory, op), options, [tensor], repeated)


@documented()
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

    Example:
        Sum the loss of all ranks on rank 0::

            dtcomm.reduce(loss, dst=0)
    """
    repeated = (group, tensor, tensor, "reduce", dst, op, codec, algorithm, checksum)
    if (work := run_repeated(repeated, async_op, seed, residual)) is not False:
        return work
    options = Options(codec, algorithm, group, async_op, seed, residual, checksum)
    communicator = get_communicator_for(group, tensor, "tensor")
    memory = in_memory(tensor, "tensor")
    root = communicator.group_rank(dst, "dst")
    output = memory if communicator.rank == root else None
    return run(communicator, Call("reduce", memory, output, op, root), options, [tensor], repeated)


@documented(whole="``input``")
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

    Example:
        Keep this rank's shard of a gradient::

            shard = torch.empty(gradient.numel() // world_size)
            dtcomm.reduce_scatter(shard, gradient, "avg", codec="int8")
    """
    repeated = (group, input, output, "reduce_scatter", op, codec, algorithm, checksum)
    if (work := run_repeated(repeated, async_op, seed, residual)) is not False:
        return work
    options = Options(codec, algorithm, group, async_op, seed, residual, checksum)
    communicator = get_communicator_for(group, output, "output")
    require_pair(output, input, "input", communicator.size)
    require_no_overlap(input, output, output.numel() * communicator.rank, "output", "input")
    return run(communicator, Call("reduce_scatter", input, output, op), options, repeated=repeated)
