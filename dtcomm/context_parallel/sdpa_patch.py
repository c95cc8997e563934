"""`context_parallel`: a context in which torch's attention is context-parallel, for models that need not be changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import functional
from typing_extensions import Unpack

from dtcomm.arguments import shares_options
from dtcomm.collectives.groups import GroupOrMesh
from dtcomm.context_parallel.attention import sharded_attention, torch_attention
from dtcomm.context_parallel.layout import chunk_count, padded_length, require_dim, shard
from dtcomm.context_parallel.state import DEFAULTS, ContextParallelState, Options, Settings, make_settings


@shares_options(DEFAULTS, Options)
@contextmanager
def context_parallel(
    group: GroupOrMesh = None,
    *,
    buffers: Sequence[torch.Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Sequence[torch.Tensor] = (),
    pad_values: Sequence[float] | None = None,
    **options: Unpack[Options],
) -> Iterator[ContextParallelState]:
    """Inside the context `torch.nn.functional.scaled_dot_product_attention` is `attention` over the group's ranks.

    It has the form of torch's experimental `context_parallel`. ``buffers`` hold whole sequences on every rank; inside
    the context they hold this rank's part. Run the backward pass inside the context too. Masks and dropout are refused.
    The replacement is that of the whole process: other threads see it too.

    Args:
        group: Process group, or a device mesh with one dimension, such as ``mesh["cp"]``. Default: all ranks.
        buffers: Tensors that are sharded in place, such as tokens, targets and tables of position embeddings, which
            must be as long as the sequence. No parameters, and no views of other tensors.
        buffer_seq_dims: The dimension of the sequence of each buffer.
        no_restore_buffers: Those of the buffers that are not needed after the context, so that no copy is kept.
        pad_values: For each buffer the value with which a sequence that does not divide is padded, such as -100 for
            targets of `torch.nn.functional.cross_entropy`. Default: such a sequence is refused.

    Yields:
        The `ContextParallelState`, whose report has what attention has sent since the context was entered.

    Raises:
        TypeError: A buffer is a parameter or requires a gradient, or an argument has a wrong type.
        ValueError: An argument is not valid, or a sequence does not divide; the message names the argument.
        RuntimeError: Another such context is active.

    Example::

        with dtcomm.context_parallel.context_parallel(
            mesh["cp"], buffers=[tokens, targets], buffer_seq_dims=[1, 1], kv_codec="int8"
        ) as state:
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        state.print_report()
    """
    settings = make_settings("dtcomm.context_parallel.context_parallel", group, options)
    dims = _require_buffers(buffers, buffer_seq_dims, no_restore_buffers, pad_values)
    length = _padded_sequence(buffers, dims, settings, pad_values)
    if functional.scaled_dot_product_attention is not torch_attention:
        raise RuntimeError(
            "context_parallel: torch.nn.functional.scaled_dot_product_attention is replaced already, by another "
            "context or another library"
        )

    def attention_of_shards(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise ValueError("attn_mask: context-parallel attention takes none; use is_causal=True")
        if dropout_p:
            raise ValueError(f"dropout_p={dropout_p}: context-parallel attention has no dropout; valid: 0")
        return sharded_attention(query, key, value, settings, is_causal, scale, enable_gqa, length)

    dropped = {id(buffer) for buffer in no_restore_buffers}
    originals = [None if id(buffer) in dropped else buffer.clone() for buffer in buffers]
    values = pad_values or [0] * len(buffers)
    shards = [
        shard(buffer, dim, group=settings.group, layout=settings.layout, pad_value=value).clone()
        for buffer, dim, value in zip(buffers, dims, values, strict=True)
    ]
    try:
        for buffer, part in zip(buffers, shards, strict=True):
            buffer.resize_(part.shape).copy_(part)
        functional.scaled_dot_product_attention = attention_of_shards
        state = ContextParallelState(settings.group)
        state.arguments = {**DEFAULTS, **options}
        yield state
    finally:
        functional.scaled_dot_product_attention = torch_attention
        for buffer, original in zip(buffers, originals, strict=True):
            if original is not None:
                buffer.resize_(original.shape).copy_(original)


def _require_buffers(
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    dropped: Sequence[torch.Tensor],
    pad_values: Sequence[float] | None,
) -> list[int]:
    """Check the buffers; return the dimensions of their sequences."""
    if len(dims) != len(buffers):
        raise ValueError(f"buffer_seq_dims: {len(dims)} dimensions for {len(buffers)} buffers")
    if pad_values is not None and len(pad_values) != len(buffers):
        raise ValueError(f"pad_values: {len(pad_values)} values for {len(buffers)} buffers")
    for number, buffer in enumerate(buffers):
        if (
            not isinstance(buffer, torch.Tensor)
            or isinstance(buffer, torch.nn.Parameter)
            or buffer.requires_grad
        ):
            raise TypeError(
                f"buffers[{number}]: expected a tensor without a gradient, which is sharded in place; "
                "shard others with dtcomm.context_parallel.shard"
            )
    if not {id(buffer) for buffer in dropped} <= {id(buffer) for buffer in buffers}:
        raise ValueError("no_restore_buffers: contains a tensor that is not one of buffers")
    return [
        require_dim(buffer, dim, f"buffer_seq_dims[{number}]")
        for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True))
    ]


def _padded_sequence(
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    settings: Settings,
    pad_values: Sequence[float] | None,
) -> int | None:
    """Return the length of the buffers' sequence if it must be padded; None if it divides among the ranks."""
    lengths = sorted({buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)})
    if len(lengths) > 1:
        raise ValueError(f"buffers: sequences of {lengths} tokens; expected the same length in all of them")
    if not lengths:
        return None
    padded = padded_length(lengths[0], settings.ranks, settings.layout)
    if padded == lengths[0]:
        return None
    if pad_values is None:
        raise ValueError(
            f"buffers: {lengths[0]} tokens do not divide among {settings.ranks} ranks, each with "
            f"{chunk_count(settings.layout, settings.ranks) // settings.ranks} chunks of the sequence; pad_values=[0, "
            f"-100], a value for each buffer, pads to {padded}"
        )
    return lengths[0]
