"""The operators of context-parallel attention, and their gradients.

`torch.ops.dtcomm.context_parallel_attention` is attention with moving keys and values (ring, all_gather), and
`torch.ops.dtcomm.context_parallel_exchange_heads` the exchange of Ulysses. They are operators so that eager code,
`torch.compile` and activation checkpointing run the same thing. Their options are plain values: codecs are specs, and
the group is its name.
"""

from __future__ import annotations

from typing import Any

import torch

from dtcomm.codecs import codec as parse
from dtcomm.context_parallel import block_attention
from dtcomm.context_parallel.exchange import (
    GRADIENTS,
    DirectGradients,
    KeyValueBlocks,
    ScatteredGradients,
    encode_keys_and_values,
    exchange_heads,
)
from dtcomm.context_parallel.layout import Visible, visible
from dtcomm.context_parallel.settings import Settings, group_by_name


def _settings(
    method: str,
    layout: str,
    kv_codec: str,
    backward_codec: str,
    seed: int,
    group: str,
    qo_codec: str = "none",
) -> Settings:
    process_group = group_by_name(group)
    return Settings(
        method=method,
        layout=layout,
        kv_codec=kv_codec,
        qo_codec=qo_codec,
        backward_codec=backward_codec,
        seed=seed,
        group_name=group,
        rank=process_group.rank(),
        ranks=process_group.size(),
    )


# --- attention with moving keys and values --------------------------------------------------------------------------


@torch.library.custom_op("dtcomm::context_parallel_attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    length: int | None,
    method: str,
    layout: str,
    kv_codec: str,
    backward_codec: str,
    seed: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output like q, the log-sum-exp fp32 [batch, heads, tokens], and the payload of k and v."""
    settings = _settings(method, layout, kv_codec, backward_codec, seed, group)
    payload = encode_keys_and_values(k, v, settings)
    total = block_attention.Accumulator(q, v.shape[-1])
    for source, keys, values in KeyValueBlocks(payload, (k.shape, v.shape), k.dtype, settings):
        part = _visible(settings, is_causal, settings.rank, source, q.shape[2], k.shape[2], length)
        if part is not None:
            total.merge(part.queries, *block_attention.forward(q, keys, values, part, scale))
    return total.out.to(q.dtype), total.lse, payload


@_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    length: int | None,
    method: str,
    layout: str,
    kv_codec: str,
    backward_codec: str,
    seed: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codec = parse(kv_codec if group_by_name(group).size() > 1 else "none")
    return (
        q.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(codec.wire_bytes(k.numel() + v.numel(), k.dtype), dtype=torch.uint8),
    )


@torch.library.custom_op("dtcomm::context_parallel_attention_backward", mutates_args=())
def _attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    payload: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k_shape: list[int],
    v_shape: list[int],
    is_causal: bool,
    scale: float,
    length: int | None,
    method: str,
    layout: str,
    kv_codec: str,
    backward_codec: str,
    seed: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v."""
    settings = _settings(method, layout, kv_codec, backward_codec, seed, group)
    rank, queries, keys = settings.rank, q.shape[2], k_shape[2]
    shapes = (k_shape, v_shape)

    def contributed(contributor: int) -> slice | None:
        part = _visible(settings, is_causal, contributor, rank, queries, keys, length)
        return None if part is None else part.keys

    exchange = (DirectGradients if method == "ring" else ScatteredGradients)(
        shapes, q.dtype, q.device, settings, contributed
    )
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for step, (source, k, v) in enumerate(KeyValueBlocks(payload, shapes, q.dtype, settings)):
        part = _visible(settings, is_causal, rank, source, queries, keys, length)
        if part is None:
            exchange.add(step, slice(0, 0), [q.new_zeros((*shape[:2], 0, shape[3])) for shape in shapes])
            continue
        block = block_attention.backward(gradient, q, k, v, out, lse, part, scale)
        dq[:, :, part.queries] += block.q
        exchange.add(step, part.keys, (block.k, block.v))
    dk, dv = exchange.finish()
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@_attention_backward.register_fake
def _(
    gradient: torch.Tensor,
    q: torch.Tensor,
    payload: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k_shape: list[int],
    v_shape: list[int],
    *options: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(k_shape), q.new_empty(v_shape)


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *ctx.options = inputs
    out, lse, payload = output
    ctx.save_for_backward(q, payload, out, lse)
    ctx.mark_non_differentiable(lse, payload)
    ctx.shapes = list(k.shape), list(v.shape)


def _differentiate_attention(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    q, payload, out, lse = ctx.saved_tensors
    gradients = torch.ops.dtcomm.context_parallel_attention_backward(
        gradient, q, payload, out, lse, *ctx.shapes, *ctx.options
    )
    return (*gradients, *(None for _ in ctx.options))


_attention.register_autograd(_differentiate_attention, setup_context=_setup_attention)


def _visible(
    settings: Settings, is_causal: bool, rank: int, source: int, queries: int, keys: int, length: int | None
) -> Visible | None:
    return visible(settings.layout, is_causal, rank, source, settings.ranks, queries, keys, length)


# --- the exchange of Ulysses ----------------------------------------------------------------------------------------


@torch.library.custom_op("dtcomm::context_parallel_exchange_heads", mutates_args=())
def _exchange_heads(
    x: torch.Tensor,
    to_heads: bool,
    codec: str,
    backward_codec: str,
    what: str,
    layout: str,
    seed: int,
    group: str,
) -> torch.Tensor:
    settings = _settings("ulysses", layout, codec, backward_codec, seed, group)
    return exchange_heads(x, codec, what, to_heads, settings)


@_exchange_heads.register_fake
def _(
    x: torch.Tensor,
    to_heads: bool,
    codec: str,
    backward_codec: str,
    what: str,
    layout: str,
    seed: int,
    group: str,
) -> torch.Tensor:
    batch, heads, tokens, dim = x.shape
    ranks = group_by_name(group).size()
    shape = (heads // ranks, tokens * ranks) if to_heads else (heads * ranks, tokens // ranks)
    return x.new_empty((batch, *shape, dim))


def _setup_exchange(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.options = inputs[1:]


def _differentiate_exchange(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    to_heads, codec, backward_codec, _, *rest = ctx.options
    dx = torch.ops.dtcomm.context_parallel_exchange_heads(
        gradient, not to_heads, backward_codec, codec, GRADIENTS, *rest
    )
    return (dx, *(None for _ in ctx.options))


_exchange_heads.register_autograd(_differentiate_exchange, setup_context=_setup_exchange)
