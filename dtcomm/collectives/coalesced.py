"""Several tensors in one call: bucketed and pipelined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch

from dtcomm.collectives._arguments import (
    CoalescedOptions,
    Group,
    Op,
    in_memory,
    require_beside,
    require_residual,
    require_tensor,
)
from dtcomm.collectives._coalesced_call import (
    BUCKET_BYTES,
    Call,
    Item,
    Residuals,
    Specs,
    kept,
    one_each,
    paired,
)
from dtcomm.runtime.communicator_cache import get_communicator_for
from dtcomm.runtime.types import Buffers
from dtcomm.runtime.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    *,
    async_op: Literal[True],
    **options: Unpack[CoalescedOptions],
) -> Work: ...


@overload
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    *,
    async_op: bool = False,
    **options: Unpack[CoalescedOptions],
) -> Work | None: ...


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    *,
    codec: Specs = "none",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residuals: Residuals = None,
    bucket_bytes: int = BUCKET_BYTES,
    checksum: bool | None = None,
) -> Work | None:
    """Reduce several tensors in place, as one message for every ``bucket_bytes`` of them.

    Messages overlap: one begins to encode and send while the last pieces of the one before are on their way.
    Each tensor keeps its own blocks and may have its own codec (``codec`` a sequence) and residual, so with
    the direct algorithms its result does not depend on what it is sent with.
    """
    tensors = list(tensors)
    communicator = get_communicator_for(group, tensors[0] if tensors else None, "tensors[0]")
    specs, losses = one_each(codec, len(tensors)), kept(residuals, len(tensors))
    items = []
    for index, (tensor, spec, residual) in enumerate(zip(tensors, specs, losses, strict=True)):
        require_tensor(tensor, f"tensors[{index}]")
        memory = in_memory(tensor, f"tensors[{index}]")
        require_beside(tensor, tensors[0], f"tensors[{index}]", "tensors[0]")
        if residual is not None:
            require_residual(residual, memory, f"residuals[{index}]", op)
        nbytes = tensor.numel() * tensor.element_size()
        buffers = Buffers(memory, memory, residual)
        items.append(Item(tensor.numel(), tensor.dtype, spec, buffers, tensor, nbytes))
    call = Call(communicator, "all_reduce", op, algorithm, checksum, seed, async_op)
    return call.run(items, bucket_bytes)


@overload
def all_gather_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    async_op: Literal[True],
    **options: Unpack[CoalescedOptions],
) -> Work: ...


@overload
def all_gather_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    async_op: bool = False,
    **options: Unpack[CoalescedOptions],
) -> Work | None: ...


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    codec: Specs = "none",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residuals: Residuals = None,
    bucket_bytes: int = BUCKET_BYTES,
    checksum: bool | None = None,
) -> Work | None:
    """Gather every rank's ``inputs[i]`` into ``outputs[i]``, in rank order, as one message for every
    ``bucket_bytes`` of outputs; messages overlap as in ``all_reduce_coalesced``.

    Sizes, dtypes, codecs and residuals may differ from tensor to tensor; each ends as by an ``all_gather`` of its own.
    """
    communicator = get_communicator_for(group, outputs[0] if outputs else None, "outputs[0]")
    items = paired(communicator, outputs, inputs, "output", codec, residuals)
    call = Call(communicator, "all_gather", "sum", algorithm, checksum, seed, async_op)
    return call.run(items, bucket_bytes)


@overload
def reduce_scatter_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: Op = "sum",
    *,
    async_op: Literal[True],
    **options: Unpack[CoalescedOptions],
) -> Work: ...


@overload
def reduce_scatter_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: Op = "sum",
    *,
    async_op: bool = False,
    **options: Unpack[CoalescedOptions],
) -> Work | None: ...


def reduce_scatter_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: Op = "sum",
    *,
    codec: Specs = "none",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residuals: Residuals = None,
    bucket_bytes: int = BUCKET_BYTES,
    checksum: bool | None = None,
) -> Work | None:
    """Reduce every ``inputs[i]`` over the ranks and leave this rank's shard in ``outputs[i]``, as one message for
    every ``bucket_bytes`` of inputs; messages overlap as in ``all_reduce_coalesced``.

    Sizes, dtypes, codecs and residuals (each like its input) may differ from tensor to tensor; with the direct
    algorithms each ends as by a ``reduce_scatter`` of its own.
    """
    communicator = get_communicator_for(group, outputs[0] if outputs else None, "outputs[0]")
    items = paired(communicator, outputs, inputs, "input", codec, residuals, op)
    call = Call(communicator, "reduce_scatter", op, algorithm, checksum, seed, async_op)
    return call.run(items, bucket_bytes)
