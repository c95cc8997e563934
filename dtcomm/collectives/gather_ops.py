"""Collectives that copy: all_gather, broadcast, gather and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from dtcomm.codecs import Codec
from dtcomm.collectives import _variable_length
from dtcomm.collectives._arguments import (
    Algorithm,
    Group,
    Options,
    in_memory,
    require_contiguous,
    require_no_overlap,
    require_pair,
    require_residual,
    require_shards,
    require_tensor,
    require_type,
)
from dtcomm.collectives._dispatch import make_plan, start
from dtcomm.runtime import warm_calls
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.communicator_cache import get_communicator_for
from dtcomm.runtime.types import Buffers
from dtcomm.work import CompositeWork, Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

Shards = Tensor | Sequence[Tensor]


@overload
def all_gather(
    output: Tensor, input: Tensor, *, async_op: Literal[True], **options: Unpack[Options]
) -> Work: ...


@overload
def all_gather(
    output: Tensor, input: Tensor, *, async_op: bool = False, **options: Unpack[Options]
) -> Work | None: ...


def all_gather(
    output: Tensor,
    input: Tensor,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Gather the inputs of all ranks on every rank.

    With a lossy codec a rank's own shard of ``output`` holds the decoded values too, so that all ranks end with the
    same bits.

    Args:
        output: The inputs of all ranks in rank order: world size times ``input.numel()`` elements, contiguous.
        input: This rank's contribution, contiguous, with the same size and dtype on all ranks. It is unchanged unless
            it is this rank's shard of ``output``.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or ``"A/B"`` with codec A
            inside hosts and B between them.
        algorithm: The algorithm's name, one of ``dtcomm.algorithms.available("all_gather")``; ``"direct"`` for the one
            or two shots that suit the codec; ``"auto"`` for the fastest by prediction or measurement; or a
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
        Gather a sharded parameter::

            whole = torch.empty(world_size * shard.numel())
            dtcomm.all_gather(whole, shard, codec="fp8_e4m3")
    """
    warm = None
    if seed is None and residual is None:
        warm = ("all_gather", group, input, output, codec, algorithm, checksum)
        if started := warm_calls.start(warm, async_op):
            return started if async_op else None
    communicator = get_communicator_for(group, output, "output")
    require_pair(output, input, "output", communicator.size)
    require_no_overlap(output, input, input.numel() * communicator.rank, "input", "output")
    key = ("all_gather", input.numel(), input.dtype, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        if _variable_length.has_variable_length(codec):
            return _variable_length.all_gather(
                output, input, communicator.size, codec, algorithm, group, async_op, residual, checksum
            )
        plan = make_plan(
            communicator,
            key,
            "all_gather",
            [(input.numel(), input.dtype, codec)],
            algorithm,
            checksum=checksum,
        )
    if residual is not None:
        require_residual(residual, input, "residual")
    buffers = [Buffers(input, output, residual)]
    return start(communicator, plan, buffers, [output], seed, async_op, warm=warm)


@overload
def broadcast(tensor: Tensor, src: int, *, async_op: Literal[True], **options: Unpack[Options]) -> Work: ...


@overload
def broadcast(
    tensor: Tensor, src: int, *, async_op: bool = False, **options: Unpack[Options]
) -> Work | None: ...


def broadcast(
    tensor: Tensor,
    src: int,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Copy the tensor of one rank to every rank of the group.

    With a lossy codec the source ends with the decoded values too, so that all ranks hold the same bits.

    Args:
        tensor: A dense tensor with the same size and dtype on all ranks: the source's value, and on the other ranks the
            output.
        src: The global rank whose tensor is copied.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or ``"A/B"`` with codec A
            inside hosts and B between them.
        algorithm: The algorithm's name, one of ``dtcomm.algorithms.available("broadcast")``; ``"direct"`` for the one
            or two shots that suit the codec; ``"auto"`` for the fastest by prediction or measurement; or a
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
        Start all ranks from the weights of rank 0::

            dtcomm.broadcast(weight, src=0)
    """
    warm = None
    if seed is None and residual is None:
        warm = ("broadcast", group, tensor, tensor, src, codec, algorithm, checksum)
        if started := warm_calls.start(warm, async_op):
            return started if async_op else None
    require_type(tensor, "tensor")
    communicator = get_communicator_for(group, tensor, "tensor")
    key = ("broadcast", tensor.numel(), tensor.dtype, src, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        require_tensor(tensor, "tensor")
        root = communicator.group_rank(src, "src")
        if _variable_length.has_variable_length(codec):
            memory, is_source = in_memory(tensor, "tensor"), root == communicator.rank
            _variable_length.broadcast(
                memory,
                src,
                is_source,
                communicator.size,
                codec,
                algorithm,
                group,
                async_op,
                residual,
                checksum,
            )
            return None
        plan = make_plan(
            communicator,
            key,
            "broadcast",
            [(tensor.numel(), tensor.dtype, codec)],
            algorithm,
            root=root,
            checksum=checksum,
        )
    tensor = in_memory(tensor, "tensor")
    if residual is not None:
        require_residual(residual, tensor, "residual")
    buffers = [Buffers(tensor, tensor, residual)]
    return start(communicator, plan, buffers, [tensor], seed, async_op, warm=warm)


@overload
def gather(
    tensor: Tensor,
    gather_list: Shards | None = None,
    dst: int = 0,
    *,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work: ...


@overload
def gather(
    tensor: Tensor,
    gather_list: Shards | None = None,
    dst: int = 0,
    *,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None: ...


def gather(
    tensor: Tensor,
    gather_list: Shards | None = None,
    dst: int = 0,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Gather the tensors of all ranks on one rank.

    The destination's own tensor is never sent, so it arrives unchanged with every codec.

    Args:
        tensor: This rank's contribution, contiguous, with the same size and dtype on all ranks.
        gather_list: The output, on ``dst`` only. A list of one tensor like ``tensor`` for each rank, or one tensor that
            holds them all in rank order, which saves a copy. None on the other ranks.
        dst: The global rank that gets the tensors.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or ``"A/B"`` with codec A
            inside hosts and B between them.
        algorithm: The algorithm's name, one of ``dtcomm.algorithms.available("gather")``; ``"direct"`` for the one or
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
        Collect the metrics of all ranks on rank 0::

            rows = torch.empty(world_size, metrics.numel()) if rank == 0 else None
            dtcomm.gather(metrics, rows, dst=0)
    """
    warm = None
    if seed is None and residual is None:
        warm = ("gather", group, tensor, gather_list, dst, codec, algorithm, checksum)
        if started := warm_calls.start(warm, async_op):
            return started if async_op else None
    communicator = get_communicator_for(group, tensor, "tensor")
    require_tensor(tensor, "tensor")
    require_contiguous(tensor, "tensor")
    root = communicator.group_rank(dst, "dst")
    output = None
    if _is_root(communicator, root, gather_list, "gather_list", "dst"):
        assert gather_list is not None
        require_shards(gather_list, tensor, "gather_list", communicator.size)
        output = _flat_output(gather_list, tensor, communicator.size)
        require_no_overlap(output, tensor, tensor.numel() * root, "tensor", "gather_list")
    key = ("gather", tensor.numel(), tensor.dtype, root, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        if _variable_length.has_variable_length(codec):
            _variable_length.gather(
                tensor, output, dst, communicator.size, codec, algorithm, group, async_op, residual, checksum
            )
            if output is not None and output is not gather_list:
                assert gather_list is not None
                _copy_to_list(output, _as_list(gather_list))
            return None
        plan = make_plan(
            communicator,
            key,
            "gather",
            [(tensor.numel(), tensor.dtype, codec)],
            algorithm,
            root=root,
            checksum=checksum,
        )
    if residual is not None:
        require_residual(residual, tensor, "residual")
    outputs = [] if gather_list is None else _as_list(gather_list)
    buffers = [Buffers(tensor, output, residual)]
    work = start(communicator, plan, buffers, outputs, seed, async_op, warm=warm)
    if output is None or output is gather_list:
        return work

    if work is not None:
        return CompositeWork([work], outputs, lambda: _copy_to_list(output, outputs))
    _copy_to_list(output, outputs)
    return None


@overload
def scatter(
    tensor: Tensor,
    scatter_list: Shards | None = None,
    src: int = 0,
    *,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work: ...


@overload
def scatter(
    tensor: Tensor,
    scatter_list: Shards | None = None,
    src: int = 0,
    *,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None: ...


def scatter(
    tensor: Tensor,
    scatter_list: Shards | None = None,
    src: int = 0,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Give every rank its shard of the tensors of one rank.

    The source's own shard is never sent, so it arrives unchanged with every codec.

    Args:
        tensor: This rank's shard, contiguous; it is the output.
        scatter_list: The input, on ``src`` only. A list of one tensor like ``tensor`` for each rank, or one tensor that
            holds them all in rank order, which saves a copy. None on the other ranks.
        src: The global rank that has the shards.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or ``"A/B"`` with codec A
            inside hosts and B between them.
        algorithm: The algorithm's name, one of ``dtcomm.algorithms.available("scatter")``; ``"direct"`` for the one or
            two shots that suit the codec; ``"auto"`` for the fastest by prediction or measurement; or a
            `dtcomm.schedule.Schedule`, or its text, for the ranks of the group.
        group: The process group; None is the default group.
        async_op: If True, start the operation and return a ``Work`` at once. The tensors must not be used until the
            work is done.
        seed: The key of stochastic rounding and of random positions, the same on all ranks; None is the number of the
            call.
        residual: Error feedback: an fp32 tensor with as many elements as all shards together, on the source only. It is
            added to this rank's contribution and then overwritten with the error of encoding it. None means no
            feedback.
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
        Distribute a batch from rank 0::

            batches = torch.randn(world_size, 32, 784) if rank == 0 else None
            dtcomm.scatter(batch, batches, src=0)
    """
    warm = None
    if seed is None and residual is None:
        warm = ("scatter", group, scatter_list, tensor, src, codec, algorithm, checksum)
        if started := warm_calls.start(warm, async_op):
            return started if async_op else None
    communicator = get_communicator_for(group, tensor, "tensor")
    require_tensor(tensor, "tensor")
    require_contiguous(tensor, "tensor")
    root = communicator.group_rank(src, "src")
    source = None
    if _is_root(communicator, root, scatter_list, "scatter_list", "src"):
        assert scatter_list is not None
        require_shards(scatter_list, tensor, "scatter_list", communicator.size)
        if isinstance(scatter_list, Tensor):
            source = scatter_list
        else:
            source = torch.cat([shard.reshape(-1) for shard in scatter_list])
        require_no_overlap(source, tensor, tensor.numel() * root, "tensor", "scatter_list")
    key = ("scatter", tensor.numel(), tensor.dtype, root, codec, algorithm, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        if _variable_length.has_variable_length(codec):
            _variable_length.scatter(
                tensor,
                source,
                src,
                communicator.rank,
                communicator.size,
                codec,
                algorithm,
                group,
                async_op,
                residual,
                checksum,
            )
            return None
        plan = make_plan(
            communicator,
            key,
            "scatter",
            [(tensor.numel(), tensor.dtype, codec)],
            algorithm,
            root=root,
            checksum=checksum,
        )
    if residual is not None:
        if source is None:
            raise ValueError("residual: only the source of a scatter encodes anything; pass None elsewhere")
        require_residual(residual, source, "residual")
    buffers = [Buffers(source, tensor, residual)]
    return start(communicator, plan, buffers, [tensor], seed, async_op, warm=warm)


def _is_root(communicator: Communicator, root: int, shards: Shards | None, argument: str, role: str) -> bool:
    """Return whether this rank is the root; only the root passes ``shards``."""
    if communicator.rank != root:
        if shards is not None:
            raise ValueError(f"{argument}: only {role}, rank {communicator.ranks[root]}, has one; pass None")
        return False
    if shards is None:
        raise ValueError(f"{argument}: {role} must pass one, with a tensor for every rank")
    return True


def _flat_output(shards: Shards, like: Tensor, ranks: int) -> Tensor:
    """Return the tensor that holds the shards of all ranks: the caller's, or a new one."""
    if isinstance(shards, Tensor):
        return shards
    return torch.empty(like.numel() * ranks, dtype=like.dtype, device=like.device)


def _as_list(shards: Shards) -> list[Tensor]:
    return [shards] if isinstance(shards, Tensor) else list(shards)


def _copy_to_list(gathered: Tensor, shards: Sequence[Tensor]) -> None:
    for shard, part in zip(shards, gathered.view(len(shards), -1), strict=True):
        shard.copy_(part.view_as(shard))
