"""`attention`: attention over a sequence that is sharded among ranks, its operators and their gradients.

`torch.ops.dtcomm.context_parallel_attention` is attention with moving keys and values (ring, all_gather), and
`torch.ops.dtcomm.context_parallel_exchange_heads` the exchange of Ulysses. They are operators so that eager code,
`torch.compile` and activation checkpointing run the same thing. Their options are plain values: codecs are specs, and
the group is its name.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.context_parallel import block_attention
from dtcomm.context_parallel.exchange import (
    GRADIENTS,
    KEYS_AND_VALUES,
    QUERIES_AND_OUTPUTS,
    DirectGradients,
    KeyValueBlocks,
    ScatteredGradients,
    encode_keys_and_values,
    exchange_heads,
)
from dtcomm.context_parallel.layout import (
    GroupOrMesh,
    Visible,
    order_by_position,
    order_by_rank,
    require_length,
    visible,
)
from dtcomm.context_parallel.state import Settings, group_by_name, make_settings

#: torch's function, which `context_parallel` replaces in torch.nn.functional.
torch_attention = functional.scaled_dot_product_attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: GroupOrMesh = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    method: str = "ring",
    kv_codec: str | Codec = "none",
    backward_codec: str | Codec | None = None,
    qo_codec: str | Codec = "none",
    layout: str = "zigzag",
    length: int | None = None,
    seed: int = 0,
    allow_inaccurate: bool = False,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys and values of all ranks. Differentiable.

    It is `torch.nn.functional.scaled_dot_product_attention` of the whole sequence, of which every rank holds the part
    that `shard` gives it. With codec ``"none"`` the results are equal to fp32 rounding.

    Args:
        q: This rank's queries, [batch, heads, tokens, head_dim]; fp32, fp16 or bf16.
        k: This rank's keys, [batch, key heads, tokens, head_dim], of the dtype of ``q``. All ranks have as many tokens.
        v: This rank's values, [batch, key heads, tokens, value head_dim].
        group: Process group, or a device mesh with one dimension. Default: all ranks.
        is_causal: Whether a token attends only to tokens up to its own position in the whole sequence. Default: False.
        scale: Factor of the scores. Default: 1 / sqrt(head_dim).
        enable_gqa: Grouped-query attention: ``k`` and ``v`` may have fewer heads, which divide those of ``q``. Default:
            False.
        method: ``"ring"`` passes keys and values from rank to rank, while a rank works on those it has (Ring
            Attention, Liu et al. 2023, arXiv:2310.01889). ``"all_gather"`` gathers them all before (Llama 3, Dubey et
            al. 2024, arXiv:2407.21783), which needs the memory of all payloads. ``"ulysses"`` gives each rank the
            whole sequence of a share of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509), which
            needs heads and key heads that the ranks divide. Default: ``"ring"``.
        kv_codec: Codec of keys and values, such as ``"int8"``, ``"fp8_e4m3"`` or ``"bf16"``. Default: ``"none"``.
        backward_codec: Codec of all gradients. Default: ``"none"`` if the other codecs are ``"none"``, else ``"bf16"``.
        qo_codec: Codec of queries and outputs, which travel with ``method="ulysses"`` only. Default: ``"none"``.
        layout: ``"zigzag"`` or ``"contiguous"``, as it was given to `shard`. Default: ``"zigzag"``.
        length: Tokens of the whole sequence without padding; keys of padding are left out. Default: no padding. Needed
            only without ``is_causal``: there no query that counts sees the padding, which is at the end.
        seed: Seed of stochastic rounding, which codecs with ``round=stochastic`` use; pass another one for each step.
            Default: 0.
        allow_inaccurate: Accept codecs that lose more than 20 % (relative error) of Gaussian numbers, such as topk,
            sign and int2, although nothing sends later what they lose. Default: False.

    Returns:
        [batch, heads, tokens, value head_dim], of the dtype of ``q``.

    Raises:
        TypeError: An argument has a wrong type or dtype; the message names it.
        ValueError: A shape, codec, method or layout is not valid; the message names the argument.
        PeerLost: If a rank died.
        CollectiveTimeout: If a rank does not take part within the group's timeout.
        CollectiveMismatch: If the ranks have different numbers of tokens, or call different operations.

    Example::

        shards = [dtcomm.context_parallel.shard(x, 2) for x in (q, k, v)]    # [batch, heads, sequence, head_dim]
        out = dtcomm.context_parallel.attention(*shards, is_causal=True, kv_codec="int8")
    """
    settings = make_settings(
        group, method, kv_codec, backward_codec, qo_codec, layout, seed, allow_inaccurate
    )
    return sharded_attention(q, k, v, settings, is_causal, scale, enable_gqa, length)


def sharded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: Settings,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    length: int | None,
) -> torch.Tensor:
    """`attention` with settings that have been checked."""
    q, k, v = _autocast(q, k, v)
    _require_tensors(q, k, v, enable_gqa)
    _require_sequences(q, k, settings, is_causal, length)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if settings.method == "ulysses" and settings.ranks > 1:
        return _ulysses(q, k, v, settings, is_causal, factor, length)
    out: torch.Tensor = torch.ops.dtcomm.context_parallel_attention(
        q,
        k,
        v,
        is_causal,
        factor,
        length,
        "ring" if settings.method == "ulysses" else settings.method,
        settings.layout,
        settings.kv_codec,
        settings.backward_codec,
        settings.seed,
        settings.group_name,
    )[0]
    return out


def _ulysses(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: Settings,
    is_causal: bool,
    scale: float,
    length: int | None,
) -> torch.Tensor:
    ranks, layout = settings.ranks, settings.layout
    for x, name in ((q, "q"), (k, "k")):
        if x.shape[1] % ranks:
            raise ValueError(
                f"{name}: {x.shape[1]} heads do not divide among {ranks} ranks, which method='ulysses' needs; use "
                "method='ring' or 'all_gather'"
            )

    def exchange(x: torch.Tensor, to_heads: bool, codec: str, what: str) -> torch.Tensor:
        exchanged: torch.Tensor = torch.ops.dtcomm.context_parallel_exchange_heads(
            x, to_heads, codec, settings.backward_codec, what, layout, settings.seed, settings.group_name
        )
        return exchanged

    # Without a mask the order of the tokens does not matter.
    ordered = is_causal or length is not None

    def whole_sequence(x: torch.Tensor, codec: str, what: str) -> torch.Tensor:
        exchanged = exchange(x, True, codec, what)
        return order_by_position(exchanged, 2, layout, ranks) if ordered else exchanged

    queries = whole_sequence(q, settings.qo_codec, QUERIES_AND_OUTPUTS)
    keys, values = (whole_sequence(x, settings.kv_codec, KEYS_AND_VALUES) for x in (k, v))
    if not is_causal:
        keys, values = keys[:, :, :length], values[:, :, :length]
    grouped = keys.shape[1] != queries.shape[1]
    out = torch_attention(queries, keys, values, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    if ordered:
        out = order_by_rank(out, 2, layout, ranks)
    return exchange(out, False, settings.qo_codec, QUERIES_AND_OUTPUTS)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in the dtype of autocast if that is on, as torch's function takes them."""
    device = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)


def _require_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> None:
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name}: expected [batch, heads, tokens, head_dim], got {tuple(x.shape)}")
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {x.dtype}")
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(
                f"{name}: is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must be equal"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"v: expected [{', '.join(map(str, k.shape[:3]))}, head_dim] as k, got {tuple(v.shape)}"
        )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k: {tuple(k.shape)} does not fit q: {tuple(q.shape)}; batch and head_dim must be equal"
        )
    if 0 in q.shape or 0 in k.shape or v.shape[3] == 0:
        raise ValueError(f"q: expected no empty dimension, got {tuple(q.shape)} and k {tuple(k.shape)}")
    if k.shape[1] != q.shape[1] and not enable_gqa:
        raise ValueError(f"k: {k.shape[1]} heads, q has {q.shape[1]}; enable_gqa=True allows fewer")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k: {k.shape[1]} heads do not divide the {q.shape[1]} heads of q")


def _require_sequences(
    q: torch.Tensor, k: torch.Tensor, settings: Settings, is_causal: bool, length: int | None
) -> None:
    if is_causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"k: {k.shape[2]} tokens, q has {q.shape[2]}; causal attention needs as many")
    if settings.ranks > 1 and settings.layout == "zigzag" and (is_causal or length is not None):
        for x, name in ((q, "q"), (k, "k")):
            if x.shape[2] % 2:
                raise ValueError(
                    f"{name}: {x.shape[2]} tokens; in the zigzag layout a rank has two equal chunks of the sequence: "
                    "dtcomm.context_parallel.shard pads, or pass layout='contiguous'"
                )
    require_length(length, k.shape[2] * settings.ranks)


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
