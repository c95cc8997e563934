"""The verbs as `torch.library` operators, `torch.ops.dtcomm.*`, for `torch.compile` and `torch.export`.

`ops` calls the ``compiled_*`` functions while torch compiles; eager code calls the kernels directly, which is tens of
microseconds faster. The module has three parts: the operators, what torch needs to know of them without running them
(fake implementations and derivatives), and the ``compiled_*`` functions that map a verb to its operators.

A codec is its spec string. `key` and `offset` are unsigned integers of 64 bits; operators take the signed integers of
the same bits. Schemas state what an operator writes: ``*_out`` operators write `out`; ``*_keep`` operators return a
new tensor and overwrite a residual or the decoded values.

Payloads are bytes and have no derivative, and neither have the values decoded from them: arguments are used as if
detached, compiled or not. Only `quantize` has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.kernels import calls, eager


@torch.library.custom_op("dtcomm::encode", mutates_args=())
def encode(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    return eager.encode(codec, x, _unsigned(key), _unsigned(offset), None, None, None)


@torch.library.custom_op("dtcomm::encode_keep", mutates_args=("residual", "decoded"))
def encode_keep(
    codec: str,
    x: torch.Tensor,
    key: int,
    offset: int,
    residual: torch.Tensor | None,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    return eager.encode(codec, x, _unsigned(key), _unsigned(offset), residual, None, decoded)


@torch.library.custom_op("dtcomm::encode_out", mutates_args=("residual", "out", "decoded"))
def encode_out(
    codec: str,
    x: torch.Tensor,
    key: int,
    offset: int,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    decoded: torch.Tensor | None,
) -> None:
    eager.encode(codec, x, _unsigned(key), _unsigned(offset), residual, out, decoded)


@torch.library.custom_op("dtcomm::decode", mutates_args=())
def decode(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return eager.decode(codec, payload, numel, dtype, None)


@torch.library.custom_op("dtcomm::decode_out", mutates_args=("out",))
def decode_out(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    eager.decode(codec, payload, numel, dtype, out)


@torch.library.custom_op("dtcomm::reduce", mutates_args=())
def reduce(
    codec: str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int,
    divisor: int,
    op: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    return eager.reduce(codec, payloads, numel, local, position, divisor, None, op, dtype)


@torch.library.custom_op("dtcomm::reduce_out", mutates_args=("out",))
def reduce_out(
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
    eager.reduce(codec, payloads, numel, local, position, divisor, out, op, dtype)


@torch.library.custom_op("dtcomm::reduce_encode", mutates_args=())
def reduce_encode(
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
    words = _unsigned(key), _unsigned(offset)
    return eager.reduce_encode(
        codec, payloads, numel, local, position, divisor, None, None, op, dtype, *words, None
    )


@torch.library.custom_op("dtcomm::reduce_encode_keep", mutates_args=("residual", "decoded"))
def reduce_encode_keep(
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
    words = _unsigned(key), _unsigned(offset)
    return eager.reduce_encode(
        codec, payloads, numel, local, position, divisor, residual, None, op, dtype, *words, decoded
    )


@torch.library.custom_op("dtcomm::reduce_encode_out", mutates_args=("residual", "out", "decoded"))
def reduce_encode_out(
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
    words = _unsigned(key), _unsigned(offset)
    eager.reduce_encode(
        codec, payloads, numel, local, position, divisor, residual, out, op, dtype, *words, decoded
    )


@torch.library.custom_op("dtcomm::quantize", mutates_args=())
def quantize(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    eager.encode(codec, x, _unsigned(key), _unsigned(offset), None, None, result)
    return result


@encode.register_fake
@encode_keep.register_fake
def _(codec: str, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return _fake_payload(codec, x, x.numel(), x.dtype)


@decode.register_fake
def _(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    calls.element_type("dtype", parse(codec), dtype)
    return payload.new_empty(numel, dtype=dtype)


@reduce.register_fake
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
    calls.element_type("dtype", parse(codec), dtype)
    return _first_term(payloads, local).new_empty(numel, dtype=dtype)


@reduce_encode.register_fake
@reduce_encode_keep.register_fake
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
    return _fake_payload(codec, _first_term(payloads, local), numel, dtype)


@encode_out.register_fake
@decode_out.register_fake
@reduce_out.register_fake
@reduce_encode_out.register_fake
def _(*_: Any, **__: Any) -> None:
    """These operators return nothing; their outputs exist already."""


@quantize.register_fake
def _(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    calls.element_type("x", parse(codec), x.dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _straight_through(context: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
    return None, gradient, None, None


quantize.register_autograd(_straight_through)


def _fake_payload(spec: str, like: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty payload. Its size may be symbolic, so `wire_bytes`, which needs a number, cannot compute it."""
    codec = parse(spec)
    calls.element_type("x", codec, dtype)
    if codec.in_python:
        return like.new_empty(codec.wire_bytes(int(numel), dtype), dtype=torch.uint8)
    layout = codec.layout(dtype)
    rest = numel % layout.granule
    # For dense codecs the formula gives 0 bytes for 0 elements, so it needs no branch on a symbolic size.
    last = 0 if layout.kept and rest == 0 else layout.bytes(rest)
    whole = numel // layout.granule * layout.bytes(layout.granule)
    return like.new_empty(whole + last, dtype=torch.uint8)


def _first_term(payloads: Sequence[torch.Tensor], local: torch.Tensor | None) -> torch.Tensor:
    first = payloads[0] if payloads else local
    if first is None:
        raise ValueError("payloads: expected at least one payload or a local tensor, got none")
    return first


def _unsigned(word: int) -> int:
    return word + 2**64 if word < 0 else word


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
        encode_out(spec, x, *words, residual, out, decoded)
        return out
    if residual is not None or decoded is not None:
        return _returned(encode_keep(spec, x, *words, residual, decoded))
    return _returned(encode(spec, x, *words))


def compiled_decode(
    codec: Codec | str, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.decode` as an operator."""
    if out is None:
        return _returned(decode(_spec(codec), payload, numel, dtype))
    decode_out(_spec(codec), payload, numel, dtype, out)
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
    spec, payloads, dtype = _spec(codec), list(payloads), _dtype(dtype, local, out)
    position = len(payloads) if position is None else position
    local = None if local is None else local.detach()
    if out is None:
        return _returned(reduce(spec, payloads, numel, local, position, divisor, op, dtype))
    reduce_out(spec, payloads, numel, local, position, divisor, op, dtype, out)
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
    spec, payloads, dtype = _spec(codec), list(payloads), _dtype(dtype, local, decoded)
    position = len(payloads) if position is None else position
    local = None if local is None else local.detach()
    words = (_signed("key", key), _signed("offset", offset))
    terms = (spec, payloads, numel, local, position, divisor, op, dtype, *words)
    if out is not None:
        reduce_encode_out(*terms, residual, out, decoded)
        return out
    if residual is not None or decoded is not None:
        return _returned(reduce_encode_keep(*terms, residual, decoded))
    return _returned(reduce_encode(*terms))


def compiled_quantize(codec: Codec | str, x: torch.Tensor, key: int, offset: int) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.quantize` as an operator."""
    return _returned(quantize(_spec(codec), x, _signed("key", key), _signed("offset", offset)))


def _dtype(dtype: torch.dtype | None, local: torch.Tensor | None, floats: torch.Tensor | None) -> torch.dtype:
    """The type of the reduced tensor, by the rule of `ops.reduce`."""
    if dtype is not None:
        return dtype
    known = local if local is not None else floats
    return torch.float32 if known is None else known.dtype


def _returned(result: torch.Tensor) -> torch.Tensor:
    """The result of an operator, for type checkers: torch does not state its type."""
    return result


def _spec(codec: Codec | str) -> str:
    return codec if isinstance(codec, str) else str(codec)


def _signed(name: str, word: int) -> int:
    """The signed integer with the bits of an unsigned one of 64 bits, for the schemas of torch."""
    word = calls.uint64(name, word)
    return word - 2**64 if word >= 2**63 else word
