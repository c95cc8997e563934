"""Collectives that copy: all_gather, broadcast, gather, scatter and all_to_all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtcomm.codecs import Codec
from dtcomm.codecs.spec import has_variable_length
from dtcomm.collectives import _encoded
from dtcomm.collectives._call import Call, exchange_splits, run
from dtcomm.collectives._options import Algorithm, Group, Options, documented
from dtcomm.collectives.checks import (
    in_memory,
    require_contiguous,
    require_no_overlap,
    require_pair,
    require_same_device,
    require_shards,
    require_tensor,
)
from dtcomm.runtime.communicator import Communicator, get_communicator_for
from dtcomm.runtime.plans import run_repeated
from dtcomm.work import CompositeWork, Work

Shards = Tensor | Sequence[Tensor]


@documented(whole="``input``")
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

    Example:
        Gather a sharded parameter::

            whole = torch.empty(world_size * shard.numel())
            dtcomm.all_gather(whole, shard, codec="fp8_e4m3")
    """
    repeated = (group, input, output, "all_gather", codec, algorithm, checksum)
    if (work := run_repeated(repeated, async_op, seed, residual)) is not False:
        return work
    options = Options(codec, algorithm, group, async_op, seed, residual, checksum)
    communicator = get_communicator_for(group, output, "output")
    require_pair(output, input, "output", communicator.size)
    require_no_overlap(output, input, input.numel() * communicator.rank, "input", "output")
    if has_variable_length(codec):
        return _encoded.all_gather(output, input, communicator.size, options)
    return run(communicator, Call("all_gather", input, output), options, repeated=repeated)


@documented()
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

    Example:
        Start all ranks from the weights of rank 0::

            dtcomm.broadcast(weight, src=0)
    """
    repeated = (group, tensor, tensor, "broadcast", src, codec, algorithm, checksum)
    if (work := run_repeated(repeated, async_op, seed, residual)) is not False:
        return work
    options = Options(codec, algorithm, group, async_op, seed, residual, checksum)
    communicator = get_communicator_for(group, tensor, "tensor")
    memory = in_memory(tensor, "tensor")
    root = communicator.group_rank(src, "src")
    if has_variable_length(codec):
        _encoded.broadcast(memory, root, communicator, options)
        return None
    return run(communicator, Call("broadcast", memory, memory, root=root), options, [tensor], repeated)


@documented()
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

    Example:
        Collect the metrics of all ranks on rank 0::

            rows = torch.empty(world_size, metrics.numel()) if rank == 0 else None
            dtcomm.gather(metrics, rows, dst=0)
    """
    repeated = (group, tensor, gather_list, "gather", dst, codec, algorithm, checksum)
    if (work := run_repeated(repeated, async_op, seed, residual)) is not False:
        return work
    options = Options(codec, algorithm, group, async_op, seed, residual, checksum)
    communicator = get_communicator_for(group, tensor, "tensor")
    require_tensor(tensor, "tensor")
    require_contiguous(tensor, "tensor")
    root = communicator.group_rank(dst, "dst")
    output = None
    if _is_root(communicator, root, gather_list, "gather_list", "dst"):
        assert gather_list is not None
        require_shards(gather_list, tensor, "gather_list", communicator.size)
        if isinstance(gather_list, Tensor):
            output = gather_list
        else:
            output = tensor.new_empty(tensor.numel() * communicator.size)
        require_no_overlap(output, tensor, tensor.numel() * root, "tensor", "gather_list")
    outputs = [gather_list] if isinstance(gather_list, Tensor) else list(gather_list or ())
    if has_variable_length(codec):
        _encoded.gather(tensor, output, root, communicator.size, options)
        work = None
    else:
        work = run(communicator, Call("gather", tensor, output, root=root), options, outputs, repeated)
    if output is None or output is gather_list:
        return work
    if work is not None:
        return CompositeWork([work], outputs, lambda: _copy_to_list(output, outputs))
    _copy_to_list(output, outputs)
    return None


@documented(whole="all shards together, on the source only")
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

    Example:
        Distribute a batch from rank 0::

            batches = torch.randn(world_size, 32, 784) if rank == 0 else None
            dtcomm.scatter(batch, batches, src=0)
    """
    repeated = (group, scatter_list, tensor, "scatter", src, codec, algorithm, checksum)
    if (work := run_repeated(repeated, async_op, seed, residual)) is not False:
        return work
    options = Options(codec, algorithm, group, async_op, seed, residual, checksum)
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
    if has_variable_length(codec):
        _encoded.scatter(tensor, source, root, communicator, options)
        return None
    if residual is not None and source is None:
        raise ValueError("residual: only the source of a scatter encodes anything; pass None elsewhere")
    return run(communicator, Call("scatter", source, tensor, root=root), options, repeated=repeated)


def _is_root(communicator: Communicator, root: int, shards: Shards | None, argument: str, role: str) -> bool:
    """Return whether this rank is the root; only the root passes ``shards``."""
    if communicator.rank != root:
        if shards is not None:
            raise ValueError(f"{argument}: only {role}, rank {communicator.ranks[root]}, has one; pass None")
        return False
    if shards is None:
        raise ValueError(f"{argument}: {role} must pass one, with a tensor for every rank")
    return True


def _copy_to_list(gathered: Tensor, shards: Sequence[Tensor]) -> None:
    for shard, part in zip(shards, gathered.view(len(shards), -1), strict=True):
        shard.copy_(part.view_as(shard))


@documented(whole="the input")
def all_to_all(
    output: Tensor,
    input: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Send a shard of the input to every rank, and receive one from every rank.

    Shard i of ``input`` goes to rank i, and rank i's shard becomes shard i of ``output``. A rank's shard for itself is
    never sent, so it arrives unchanged with every codec.

    Args:
        output: The received shards in rank order, contiguous.
        input: The shards to send in rank order, contiguous, of the dtype of ``output``.
        output_splits: The rows (along dimension 0) that come from each rank; None means equal rows.
        input_splits: The rows that go to each rank; None means equal rows. Either all ranks of the group pass splits or
            none does. With splits the ranks exchange the sizes first, so the call returns only when all ranks have made
            it, even with ``async_op``.

    Example:
        Exchange the tokens of experts::

            received = torch.empty(sum(output_splits), features)
            dtcomm.all_to_all(received, tokens, output_splits, input_splits, codec="fp8_e4m3")
    """
    repeated = None
    if output_splits is None and input_splits is None:
        repeated = (group, input, output, "all_to_all", codec, algorithm, checksum)
        if (work := run_repeated(repeated, async_op, seed, residual)) is not False:
            return work
    options = Options(codec, algorithm, group, async_op, seed, residual, checksum)
    communicator = get_communicator_for(group, output, "output")
    require_exchange(output, input)
    if repeated is not None:
        sent = received = [require_equal_shards(output, input, communicator.size)] * communicator.size
    else:
        sent = _elements(input, input_splits, "input", communicator.size)
        received = _elements(output, output_splits, "output", communicator.size)
    if has_variable_length(codec):
        _encoded.all_to_all(output, input, sent, received, communicator, options)
        return None
    splits = () if repeated is not None else exchange_splits(communicator, sent, received, group)
    return run(communicator, Call("all_to_all", input, output, splits=splits), options, repeated=repeated)


def require_exchange(output: Tensor, input: Tensor) -> None:
    """Check the tensors of an all_to_all as far as that does not depend on splits."""
    require_tensor(output, "output")
    require_tensor(input, "input")
    if input.dtype != output.dtype:
        raise TypeError(f"output: is {output.dtype}, input is {input.dtype}; they must be equal")
    require_contiguous(output, "output")
    require_contiguous(input, "input")
    require_same_device(output, input, "output", "input")
    require_no_overlap(input, output, None, "output", "input")


def require_equal_shards(output: Tensor, input: Tensor, ranks: int) -> int:
    """Return the elements of a shard of an all_to_all without splits; ValueError if the shards are not equal."""
    if input.numel() != output.numel():
        raise ValueError(
            f"output: has {output.numel()} elements, input {input.numel()}; without splits they are equal"
        )
    if input.numel() % ranks:
        raise ValueError(
            f"input: has {input.numel()} elements, which do not divide into {ranks} equal shards; give splits"
        )
    return input.numel() // ranks


def _elements(tensor: Tensor, splits: Sequence[int] | None, name: str, ranks: int) -> list[int]:
    if tensor.dim() == 0:
        raise ValueError(f"{name}: a tensor without dimensions has no rows to split")
    rows = tensor.shape[0]
    if splits is None:
        if rows % ranks:
            raise ValueError(f"{name}: has {rows} rows, which do not divide equally over {ranks} ranks")
        splits = [rows // ranks] * ranks
    if len(splits) != ranks:
        raise ValueError(f"{name}_splits: has {len(splits)} entries, the group {ranks} ranks")
    if min(splits) < 0 or sum(splits) != rows:
        raise ValueError(f"{name}_splits: {list(splits)} do not add up to the {rows} rows of {name}")
    width = tensor.numel() // rows if rows else 0
    return [split * width for split in splits]
