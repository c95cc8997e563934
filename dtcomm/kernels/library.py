"""The verbs as torch operators, so that torch.compile and torch.export can carry them: `torch.ops.dtcomm.*`.

`dtcomm.encode` and the other verbs become these operators by themselves while torch compiles; eager code calls the
kernels directly, which is tens of microseconds faster. A codec is its spec string; `key` and `offset`, 64 bits without
a sign, travel as the signed integers of the same bits. What an operator writes into stands in its schema: `*_out` put
the result into `out`, `*_keep` return it and rewrite a residual or what the payload decodes to.

Derivatives: payloads are bytes and have none, and neither have the floats that are decoded from them; the verbs take
every tensor as if detached, compiled or not. :func:`quantize` is decode(encode(x)) whose gradient passes straight
through, for training with the codec's error in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.kernels import checks, ops


def quantize(codec: Codec | str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    """decode(encode(x)), of the shape and type of x, in one pass; its gradient goes to x as it is.

    Raises TypeError or ValueError naming the argument.
    """
    return _fresh(_quantize(_spec(codec), x, _signed("key", key), _signed("offset", offset)))


def compiled_encode(
    codec: Codec | str,
    x: torch.Tensor,
    key: int,
    offset: int,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.encode` as an operator."""
    spec, x, words = _spec(codec), x.detach(), (_signed("key", key), _signed("offset", offset))
    if out is not None:
        _encode_out(spec, x, *words, residual, out, decoded)
        return out
    if residual is not None or decoded is not None:
        return _fresh(_encode_keep(spec, x, *words, residual, decoded))
    return _fresh(_encode(spec, x, *words))


def compiled_decode(
    codec: Codec | str, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.decode` as an operator."""
    if out is None:
        return _fresh(_decode(_spec(codec), payload, numel, dtype))
    _decode_out(_spec(codec), payload, numel, dtype, out)
    return out


def compiled_reduce(
    codec: Codec | str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int | None,
    divisor: int,
    out: torch.Tensor | None,
    op: str,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.reduce` as an operator."""
    spec, payloads, dtype = _spec(codec), list(payloads), _type(dtype, local, out)
    position = len(payloads) if position is None else position
    local = None if local is None else local.detach()
    if out is None:
        return _fresh(_reduce(spec, payloads, numel, local, position, divisor, op, dtype))
    _reduce_out(spec, payloads, numel, local, position, divisor, op, dtype, out)
    return out


def compiled_reduce_encode(
    codec: Codec | str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int | None,
    divisor: int,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    op: str,
    dtype: torch.dtype | None,
    key: int,
    offset: int,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.reduce_encode` as an operator."""
    spec, payloads, dtype = _spec(codec), list(payloads), _type(dtype, local, decoded)
    position = len(payloads) if position is None else position
    local = None if local is None else local.detach()
    words = (_signed("key", key), _signed("offset", offset))
    terms = (spec, payloads, numel, local, position, divisor, op, dtype, *words)
    if out is not None:
        _reduce_encode_out(*terms, residual, out, decoded)
        return out
    if residual is not None or decoded is not None:
        return _fresh(_reduce_encode_keep(*terms, residual, decoded))
    return _fresh(_reduce_encode(*terms))


# --- the operators: what they compute, then what torch is told of it without computing ------------------------


@torch.library.custom_op("dtcomm::encode", mutates_args=())
def _encode(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    return ops.encode(codec, x, _unsigned(key), _unsigned(offset))


@torch.library.custom_op("dtcomm::encode_keep", mutates_args=("residual", "decoded"))
def _encode_keep(
    codec: str,
    x: torch.Tensor,
    key: int,
    offset: int,
    residual: torch.Tensor | None,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    return ops.encode(codec, x, _unsigned(key), _unsigned(offset), residual, decoded=decoded)


@torch.library.custom_op("dtcomm::encode_out", mutates_args=("residual", "out", "decoded"))
def _encode_out(
    codec: str,
    x: torch.Tensor,
    key: int,
    offset: int,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    decoded: torch.Tensor | None,
) -> None:
    ops.encode(codec, x, _unsigned(key), _unsigned(offset), residual, out, decoded=decoded)


@torch.library.custom_op("dtcomm::decode", mutates_args=())
def _decode(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ops.decode(codec, payload, numel, dtype)


@torch.library.custom_op("dtcomm::decode_out", mutates_args=("out",))
def _decode_out(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    ops.decode(codec, payload, numel, dtype, out)


@torch.library.custom_op("dtcomm::reduce", mutates_args=())
def _reduce(
    codec: str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int,
    divisor: int,
    op: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    return ops.reduce(codec, payloads, numel, local, position, divisor, op=op, dtype=dtype)


@torch.library.custom_op("dtcomm::reduce_out", mutates_args=("out",))
def _reduce_out(
    codec: str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int,
    divisor: int,
    op: str,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    ops.reduce(codec, payloads, numel, local, position, divisor, out, op=op, dtype=dtype)


@torch.library.custom_op("dtcomm::reduce_encode", mutates_args=())
def _reduce_encode(
    codec: str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int,
    divisor: int,
    op: str,
    dtype: torch.dtype,
    key: int = 0,
    offset: int = 0,
) -> torch.Tensor:
    return ops.reduce_encode(
        codec,
        payloads,
        numel,
        local,
        position,
        divisor,
        op=op,
        dtype=dtype,
        key=_unsigned(key),
        offset=_unsigned(offset),
    )


@torch.library.custom_op("dtcomm::reduce_encode_keep", mutates_args=("residual", "decoded"))
def _reduce_encode_keep(
    codec: str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int,
    divisor: int,
    op: str,
    dtype: torch.dtype,
    key: int,
    offset: int,
    residual: torch.Tensor | None,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    return ops.reduce_encode(
        codec,
        payloads,
        numel,
        local,
        position,
        divisor,
        residual,
        op=op,
        dtype=dtype,
        key=_unsigned(key),
        offset=_unsigned(offset),
        decoded=decoded,
    )


@torch.library.custom_op("dtcomm::reduce_encode_out", mutates_args=("residual", "out", "decoded"))
def _reduce_encode_out(
    codec: str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int,
    divisor: int,
    op: str,
    dtype: torch.dtype,
    key: int,
    offset: int,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    decoded: torch.Tensor | None,
) -> None:
    ops.reduce_encode(
        codec,
        payloads,
        numel,
        local,
        position,
        divisor,
        residual,
        out,
        op=op,
        dtype=dtype,
        key=_unsigned(key),
        offset=_unsigned(offset),
        decoded=decoded,
    )


@torch.library.custom_op("dtcomm::quantize", mutates_args=())
def _quantize(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops.encode(codec, x, _unsigned(key), _unsigned(offset), decoded=result)
    return result


@_encode.register_fake
@_encode_keep.register_fake
def _(codec: str, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return _fake_payload(codec, x, x.numel(), x.dtype)


@_decode.register_fake
def _(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    checks.element_type("dtype", parse(codec), dtype)
    return payload.new_empty(numel, dtype=dtype)


@_reduce.register_fake
def _(
    codec: str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int,
    divisor: int,
    op: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    checks.element_type("dtype", parse(codec), dtype)
    return _beside(payloads, local).new_empty(numel, dtype=dtype)


@_reduce_encode.register_fake
@_reduce_encode_keep.register_fake
def _(
    codec: str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int,
    divisor: int,
    op: str,
    dtype: torch.dtype,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    return _fake_payload(codec, _beside(payloads, local), numel, dtype)


@_encode_out.register_fake
@_decode_out.register_fake
@_reduce_out.register_fake
@_reduce_encode_out.register_fake
def _(*_: Any, **__: Any) -> None:
    """Nothing is returned, and what is written into has its size."""


@_quantize.register_fake
def _(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    checks.element_type("x", parse(codec), x.dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _straight_through(context: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
    return None, gradient, None, None


_quantize.register_autograd(_straight_through)


# --- between the verbs and the operators ----------------------------------------------------------------------


def _fake_payload(spec: str, beside: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty payload of a size that may be symbolic, where `wire_bytes` insists on a number."""
    codec = parse(spec)
    checks.element_type("x", codec, dtype)
    layout = codec.layout(dtype)
    rest = numel % layout.granule
    # Of no elements a dense granule has no bytes by the same formula, which needs no question to be asked.
    last = 0 if layout.kept and rest == 0 else layout.bytes(rest)
    whole = numel // layout.granule * layout.bytes(layout.granule)
    return beside.new_empty(whole + last, dtype=torch.uint8)


def _beside(payloads: Sequence[torch.Tensor], local: torch.Tensor | None) -> torch.Tensor:
    first = payloads[0] if payloads else local
    if first is None:
        raise ValueError("payloads: expected at least one payload or a local tensor, got none")
    return first


def _type(dtype: torch.dtype | None, local: torch.Tensor | None, floats: torch.Tensor | None) -> torch.dtype:
    """What ops takes for the type of the tensor that is reduced."""
    if dtype is not None:
        return dtype
    known = local if local is not None else floats
    return torch.float32 if known is None else known.dtype


def _fresh(result: torch.Tensor) -> torch.Tensor:
    """What an operator returned, whose type torch leaves open."""
    return result


def _spec(codec: Codec | str) -> str:
    return codec if isinstance(codec, str) else str(codec)


def _signed(name: str, word: int) -> int:
    """64 bits without a sign as the integer of torch's schemas."""
    word = checks.word(name, word)
    return word - 2**64 if word >= 2**63 else word


def _unsigned(word: int) -> int:
    return word + 2**64 if word < 0 else word
