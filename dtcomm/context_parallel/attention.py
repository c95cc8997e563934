"""`attention`: attention over a sequence that is sharded among ranks, its operators and their gradients.

`torch.ops.dtcomm.context_parallel_attention` is attention with moving keys and values (ring, all_gather), and
`torch.ops.dtcomm.context_parallel_exchange_heads` the exchange of Ulysses. They are operators so that eager code,
`torch.compile` and activation checkpointing run the same thing. They take the settings as text.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional
from typing_extensions import Unpack

from dtcomm.arguments import shares_options
from dtcomm.codecs import codec as parse
from dtcomm.collectives.groups import GroupOrMesh
from dtcomm.context_parallel import block_attention
from dtcomm.context_parallel.exchange import (
    DirectGradients,
    KeyValueBlocks,
    ScatteredGradients,
    encode_keys_and_values,
    exchange_heads,
)
from dtcomm.context_parallel.layout import Visible, order_by_position, order_by_rank, require_length, visible
from dtcomm.context_parallel.state import (
    DEFAULTS,
    GRADIENTS,
    KEYS_AND_VALUES,
    QUERIES_AND_OUTPUTS,
    Options,
    Settings,
    make_settings,
)
from dtcomm.errors import CollectiveMismatch

#: torch's function, which `context_parallel` replaces in torch.nn.functional.
torch_attention = functional.scaled_dot_product_attention


@shares_options(DEFAULTS, Options)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: GroupOrMesh = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    length: int | None = None,
    **options: Unpack[Options],
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
        length: Tokens of the whole sequence without padding; keys of padding are left out. Default: no padding. Needed
            only without ``is_causal``: there no query that counts sees the padding, which is at the end.

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
    settings = make_settings("dtcomm.context_parallel.attention", group, options)
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
    # On one rank Ulysses is a ring of one rank.
    out: torch.Tensor = torch.ops.dtcomm.context_parallel_attention(
        q, k, v, is_causal, factor, length, settings.text
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

    def exchange(x: torch.Tensor, what: str, to_heads: bool) -> torch.Tensor:
        exchanged: torch.Tensor = torch.ops.dtcomm.context_parallel_exchange_heads(
            x, what, to_heads, settings.text
        )
        return exchanged

    # Without a mask the order of the tokens does not matter.
    ordered = is_causal or length is not None

    def whole_sequence(x: torch.Tensor, what: str) -> torch.Tensor:
        exchanged = exchange(x, what, True)
        return order_by_position(exchanged, 2, layout, ranks) if ordered else exchanged

    queries = whole_sequence(q, QUERIES_AND_OUTPUTS)
    keys, values = (whole_sequence(x, KEYS_AND_VALUES) for x in (k, v))
    if not is_causal:
        keys, values = keys[:, :, :length], values[:, :, :length]
    grouped = keys.shape[1] != queries.shape[1]
    out = torch_attention(queries, keys, values, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    if ordered:
        out = order_by_rank(out, 2, layout, ranks)
    return exchange(out, QUERIES_AND_OUTPUTS, False)


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


# --- attention with moving keys and values --------------------------------------------------------------------------


@torch.library.custom_op("dtcomm::context_parallel_attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    length: int | None,
    settings: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output like q, the log-sum-exp fp32 [batch, heads, tokens], and the payload of k and v."""
    given = Settings.of(settings)
    payload = encode_keys_and_values(k, v, given)
    total = block_attention.Accumulator(q, v.shape[-1])
    try:
        for source, keys, values in KeyValueBlocks(payload, (k.shape, v.shape), k.dtype, given):
            part = _visible(given, is_causal, given.rank, source, q.shape[2], k.shape[2], length)
            if part is not None:
                total.merge(part.queries, *block_attention.forward(q, keys, values, part, scale))
    except CollectiveMismatch as error:
        text = f"k: all ranks need as many tokens of one dtype; this one has {k.shape[2]} of {k.dtype}"
        raise CollectiveMismatch(f"{text}: {error}") from None
    return total.out.to(q.dtype), total.lse, payload


@_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = Settings.of(options[-1])
    codec = parse(given.kv_codec if given.ranks > 1 else "none")
    return (
        q.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(codec.wire_bytes(k.numel() + v.numel(), k.dtype), dtype=torch.uint8),
    )


@torch.library.custom_op("dtcomm::context_parallel_attention_backward", mutates_args=())
def _attention_backward(
    gradient: torch.Tensor,
    saved: list[torch.Tensor],
    k_shape: list[int],
    v_shape: list[int],
    is_causal: bool,
    scale: float,
    length: int | None,
    settings: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v. Of the forward pass q, the payload, the output and lse are ``saved``."""
    given = Settings.of(settings)
    q, payload, out, lse = saved
    rank, queries, keys = given.rank, q.shape[2], k_shape[2]
    shapes = (k_shape, v_shape)

    def contributed(contributor: int) -> slice | None:
        part = _visible(given, is_causal, contributor, rank, queries, keys, length)
        return None if part is None else part.keys

    exchange = (ScatteredGradients if given.method == "all_gather" else DirectGradients)(
        shapes, q.dtype, q.device, given, contributed
    )
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for step, (source, k, v) in enumerate(KeyValueBlocks(payload, shapes, q.dtype, given)):
        part = _visible(given, is_causal, rank, source, queries, keys, length)
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
    saved: list[torch.Tensor],
    k_shape: list[int],
    v_shape: list[int],
    *options: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = saved[0]
    return q.new_empty(q.shape), q.new_empty(k_shape), q.new_empty(v_shape)


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *ctx.options = inputs
    out, lse, payload = output
    ctx.save_for_backward(q, payload, out, lse)
    ctx.mark_non_differentiable(lse, payload)
    ctx.shapes = list(k.shape), list(v.shape)


def _differentiate_attention(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    gradients = torch.ops.dtcomm.context_parallel_attention_backward(
        gradient, list(ctx.saved_tensors), *ctx.shapes, *ctx.options
    )
    return (*gradients, *(None for _ in ctx.options))


_attention.register_autograd(_differentiate_attention, setup_context=_setup_attention)


def _visible(
    settings: Settings, is_causal: bool, rank: int, source: int, queries: int, keys: int, length: int | None
) -> Visible | None:
    return visible(settings.layout, is_causal, rank, source, settings.ranks, queries, keys, length)


# --- the exchange of Ulysses ----------------------------------------------------------------------------------------


@torch.library.custom_op("dtcomm::context_parallel_exchange_heads", mutates_args=())
def _exchange_heads(x: torch.Tensor, what: str, to_heads: bool, settings: str) -> torch.Tensor:
    return exchange_heads(x, what, to_heads, Settings.of(settings))


@_exchange_heads.register_fake
def _(x: torch.Tensor, what: str, to_heads: bool, settings: str) -> torch.Tensor:
    batch, heads, tokens, dim = x.shape
    ranks = Settings.of(settings).ranks
    shape = (heads // ranks, tokens * ranks) if to_heads else (heads * ranks, tokens // ranks)
    return x.new_empty((batch, *shape, dim))


def _setup_exchange(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, ctx.to_heads, ctx.settings = inputs


def _differentiate_exchange(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    dx = torch.ops.dtcomm.context_parallel_exchange_heads(gradient, GRADIENTS, not ctx.to_heads, ctx.settings)
    return dx, None, None, None


_exchange_heads.register_autograd(_differentiate_exchange, setup_context=_setup_exchange)
