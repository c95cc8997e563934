"""Several tensors in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.codecs import Codec
from dtcomm.collectives.arguments import Group, Op, in_memory, require_residual, require_tensor
from dtcomm.collectives.launch import Several, plan_for, start
from dtcomm.runtime.communicator import find
from dtcomm.runtime.shm import Buffers
from dtcomm.runtime.work import Work


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    *,
    codec: str | Codec | Sequence[str | Codec] = "none",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residuals: Sequence[torch.Tensor | None] | None = None,
    bucket_bytes: int = 25 * 2**20,
    checksum: bool | None = None,
) -> Work | None:
    """Reduce several tensors in place, as one message for every ``bucket_bytes`` of them.

    Messages overlap: one begins to encode and send while the last pieces of the one before are on their way.
    Each tensor keeps its own blocks and may have its own codec (``codec`` a sequence) and residual, so with
    the direct algorithms its result does not depend on what it is sent with.
    """
    tensors = list(tensors)
    communicator = find(group)
    listed = [codec] * len(tensors) if isinstance(codec, str | Codec) else list(codec)
    if len(listed) != len(tensors):
        raise ValueError(f"codec: {len(listed)} codecs for {len(tensors)} tensors; give one, or one a tensor")
    kept = [None] * len(tensors) if residuals is None else list(residuals)
    if len(kept) != len(tensors):
        raise ValueError(f"residuals: {len(kept)} for {len(tensors)} tensors; give one (or None) a tensor")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: must be at least 1, got {bucket_bytes}")
    buffers = []
    for index, (tensor, residual) in enumerate(zip(tensors, kept, strict=True)):
        require_tensor(tensor, f"tensors[{index}]")
        tensor = in_memory(tensor, f"tensors[{index}]")
        if residual is not None:
            require_residual(residual, tensor, f"residuals[{index}]", op)
        buffers.append(Buffers(tensor, tensor, residual))
    messages = []
    for first, last in _buckets(tensors, bucket_bytes):
        part = tensors[first:last]
        numels = tuple(tensor.numel() for tensor in part)
        dtypes = tuple(tensor.dtype for tensor in part)
        specs = tuple(listed[first:last])
        key = ("all_reduce", numels, dtypes, op, specs, algorithm, checksum)
        plan = communicator.plans.get(key)
        if plan is None:
            plan = plan_for(
                communicator, key, "all_reduce", op, numels, dtypes, specs, algorithm, checksum=checksum
            )
        messages.append((plan, buffers[first:last], part))
    queued = async_op or len(messages) > 1  # only what is queued is begun ahead
    works = [start(communicator, plan, held, part, seed, queued) for plan, held, part in messages]
    if not async_op:
        for work in works:
            if work is not None:
                work.wait()
        return None
    if len(works) == 1:
        return works[0]
    return Several([work for work in works if work is not None], tensors)


def _buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> list[tuple[int, int]]:
    """Ranges of neighbours, each of at most ``bucket_bytes`` unless a single tensor is larger."""
    ranges: list[tuple[int, int]] = []
    start = held = 0
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if index > start and held + size > bucket_bytes:
            ranges.append((start, index))
            start, held = index, 0
        held += size
    if len(tensors) > start or not tensors:
        ranges.append((start, len(tensors)))
    return ranges
