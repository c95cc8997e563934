"""Collectives of several tensors in one call, which are sent in buckets that overlap each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtcomm.codecs import Codec
from dtcomm.collectives._call import start
from dtcomm.collectives._options import Algorithm, Group, Op, Options, documented
from dtcomm.collectives.checks import (
    in_memory,
    require_no_overlap,
    require_pair,
    require_residual,
    require_same_device,
)
from dtcomm.collectives.planning import Request, make_plan
from dtcomm.runtime.communicator import Communicator, get_communicator_for
from dtcomm.runtime.types import Buffers
from dtcomm.work import CompositeWork, Work

Specs = str | Codec | Sequence[str | Codec]
Residuals = Sequence[Tensor | None] | None
BUCKET_BYTES = 25 * 2**20
# A shard of at least this many bytes that is only copied has a message of its own: peers read it without staging then.
MIN_SEPARATE_BYTES = 2**20


@documented()
def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Op = "sum",
    *,
    codec: Specs = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residuals: Residuals = None,
    bucket_bytes: int = BUCKET_BYTES,
    checksum: bool | None = None,
) -> Work | None:
    """Reduce several tensors in place, with one message for every ``bucket_bytes`` of them.

    Messages overlap: one starts to encode and send while the last pieces of the previous one are on their way. Each
    tensor keeps its own codec blocks, so with the direct algorithms its result does not depend on the tensors that it
    is sent with.

    Args:
        tensors: Dense tensors on one device; sizes and dtypes may differ from tensor to tensor. They are overwritten
            with the results.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or a sequence with one for each
            tensor.
        bucket_bytes: The most bytes of tensors in one message, at least 1; a larger tensor has a message of its own.

    Example:
        Average all gradients of a model::

            dtcomm.all_reduce_coalesced([p.grad for p in model.parameters()], "avg", codec="int8")
    """
    tensors = list(tensors)
    communicator = get_communicator_for(group, tensors[0] if tensors else None, "tensors[0]")
    specs, tensor_residuals = _per_tensor(codec, residuals, len(tensors))
    segments = []
    for index, (tensor, spec, residual) in enumerate(zip(tensors, specs, tensor_residuals, strict=True)):
        memory = in_memory(tensor, f"tensors[{index}]")
        require_same_device(tensor, tensors[0], f"tensors[{index}]", "tensors[0]")
        if residual is not None:
            require_residual(residual, memory, f"residuals[{index}]", op)
        nbytes = tensor.numel() * tensor.element_size()
        buffers = Buffers(memory, memory, residual)
        segments.append(_Segment(tensor.numel(), tensor.dtype, spec, buffers, tensor, nbytes))
    options = Options(algorithm=algorithm, group=group, async_op=async_op, seed=seed, checksum=checksum)
    return _run_buckets(communicator, "all_reduce", op, _buckets(segments, bucket_bytes), options)


@documented(whole="the input")
def all_gather_coalesced(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    codec: Specs = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residuals: Residuals = None,
    bucket_bytes: int = BUCKET_BYTES,
    checksum: bool | None = None,
) -> Work | None:
    """Gather several tensors on every rank, with one message for every ``bucket_bytes`` of outputs.

    Messages overlap: one starts to encode and send while the last pieces of the previous one are on their way. Each
    output ends as by an `all_gather` of its own.

    Args:
        outputs: One tensor for each input, with the inputs of all ranks in rank order; see `all_gather`.
        inputs: This rank's contributions. Sizes and dtypes may differ from tensor to tensor.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or a sequence with one for each
            tensor.
        bucket_bytes: The most bytes of outputs in one message, at least 1; a larger tensor has a message of its own.

    Example:
        Gather the shards of two parameters::

            dtcomm.all_gather_coalesced([weight, bias], [weight_shard, bias_shard], codec="fp8_e4m3")
    """
    communicator = get_communicator_for(group, outputs[0] if outputs else None, "outputs[0]")
    segments = _segments_of_pairs(communicator, outputs, inputs, "output", codec, residuals)
    options = Options(algorithm=algorithm, group=group, async_op=async_op, seed=seed, checksum=checksum)
    return _run_buckets(communicator, "all_gather", "sum", _buckets(segments, bucket_bytes), options)


@documented(whole="the input")
def reduce_scatter_coalesced(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    op: Op = "sum",
    *,
    codec: Specs = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residuals: Residuals = None,
    bucket_bytes: int = BUCKET_BYTES,
    checksum: bool | None = None,
) -> Work | None:
    """Reduce several tensors and leave each rank one shard of each; one message carries ``bucket_bytes`` of inputs.

    Messages overlap: one starts to encode and send while the last pieces of the previous one are on their way. With the
    direct algorithms each output ends as by a `reduce_scatter` of its own.

    Args:
        outputs: This rank's shard of each result; see `reduce_scatter`.
        inputs: One tensor for each output, with a shard for every rank in rank order. Sizes and dtypes may differ from
            tensor to tensor.
        codec: The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or a sequence with one for each
            tensor.
        bucket_bytes: The most bytes of inputs in one message, at least 1; a larger tensor has a message of its own.

    Example:
        Keep the shards of two gradients::

            dtcomm.reduce_scatter_coalesced([w_shard, b_shard], [w_grad, b_grad], "avg", codec="int8")
    """
    communicator = get_communicator_for(group, outputs[0] if outputs else None, "outputs[0]")
    segments = _segments_of_pairs(communicator, outputs, inputs, "input", codec, residuals, op)
    options = Options(algorithm=algorithm, group=group, async_op=async_op, seed=seed, checksum=checksum)
    return _run_buckets(communicator, "reduce_scatter", op, _buckets(segments, bucket_bytes), options)


class _Segment(NamedTuple):
    """One tensor of a call.

    ``numel`` is that of `TensorSpec`; ``nbytes`` are the bytes of the whole tensor. A ``separate`` segment has a
    message of its own.
    """

    numel: int
    dtype: torch.dtype
    spec: str | Codec
    buffers: Buffers
    output: Tensor
    nbytes: int
    separate: bool = False


def _run_buckets(
    communicator: Communicator,
    collective: str,
    op: Op,
    buckets: Sequence[Sequence[_Segment]],
    options: Options,
) -> Work | None:
    """Send a message for every bucket; each segment has its own codec and residual.

    All messages are queued before the first one is complete, so that each starts to encode and send while the last
    pieces of the previous one are on their way.
    """
    if not options.async_op:
        communicator.connect()
    # All plans come first: an error in one message must not leave others under way.
    plans = []
    for bucket in buckets:
        parts = tuple((segment.numel, segment.dtype, segment.spec) for segment in bucket)
        feedback = any(segment.buffers.residual is not None for segment in bucket)
        request = Request(collective, parts, op, options.algorithm, options.checksum, feedback=feedback)
        plans.append(communicator.plans.get(request) or make_plan(communicator, request))
    queued = options.async_op or len(buckets) > 1  # only queued operations start ahead of time
    works = [
        start(
            communicator,
            plan,
            [segment.buffers for segment in bucket],
            [segment.output for segment in bucket],
            options._replace(async_op=queued),
        )
        for plan, bucket in zip(plans, buckets, strict=True)
    ]
    started = [work for work in works if work is not None]
    if not options.async_op:
        for work in started:
            work.wait()
        return None
    if len(started) == 1:
        return started[0]
    return CompositeWork(started, [segment.output for bucket in buckets for segment in bucket])


def _segments_of_pairs(
    communicator: Communicator,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    whole: str,
    codec: Specs,
    residuals: Residuals,
    op: Any = "sum",
) -> list[_Segment]:
    """Return the segments of outputs and inputs; ``whole``, "output" or "input", hold a shard for every rank."""
    if len(outputs) != len(inputs):
        raise ValueError(
            f"outputs: has {len(outputs)} tensors, inputs {len(inputs)}; expected one output for each input"
        )
    segments = []
    specs, tensor_residuals = _per_tensor(codec, residuals, len(inputs))
    pairs = zip(outputs, inputs, specs, tensor_residuals, strict=True)
    for index, (output, input, spec, residual) in enumerate(pairs):
        names = (f"outputs[{index}]", f"inputs[{index}]")
        require_pair(output, input, whole, communicator.size, names)
        require_same_device(output, outputs[0], names[0], "outputs[0]")
        large, small = (output, input) if whole == "output" else (input, output)
        large_name, small_name = names if whole == "output" else names[::-1]
        require_no_overlap(large, small, small.numel() * communicator.rank, small_name, large_name)
        if residual is not None:
            require_residual(residual, input, f"residuals[{index}]", op)
        separate = str(spec) == "none" and small.numel() * small.element_size() >= MIN_SEPARATE_BYTES
        nbytes = large.numel() * large.element_size()
        buffers = Buffers(input, output, residual)
        segments.append(_Segment(small.numel(), small.dtype, spec, buffers, output, nbytes, separate))
    return segments


def _per_tensor(
    codec: Specs, residuals: Residuals, count: int
) -> tuple[list[str | Codec], list[Tensor | None]]:
    specs = [codec] * count if isinstance(codec, str | Codec) else list(codec)
    if len(specs) != count:
        raise ValueError(
            f"codec: has {len(specs)} codecs for {count} tensors; give one, or one for each tensor"
        )
    of_tensors: list[Tensor | None] = [None] * count if residuals is None else list(residuals)
    if len(of_tensors) != count:
        raise ValueError(
            f"residuals: has {len(of_tensors)} for {count} tensors; give one (or None) for each tensor"
        )
    return specs, of_tensors


def _buckets(segments: Sequence[_Segment], bucket_bytes: int) -> list[Sequence[_Segment]]:
    """Return neighbours of at most ``bucket_bytes`` together, unless one tensor is larger; at least one bucket."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: must be at least 1, got {bucket_bytes}")
    buckets: list[list[_Segment]] = [[]]
    nbytes = 0
    for segment in segments:
        bucket = buckets[-1]
        if bucket and (nbytes + segment.nbytes > bucket_bytes or segment.separate or bucket[-1].separate):
            buckets.append([])
            nbytes = 0
        buckets[-1].append(segment)
        nbytes += segment.nbytes
    return list(buckets)
