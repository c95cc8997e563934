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

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.kernels import calls, eager

_PLAIN = "str codec, Tensor x, SymInt key=0, SymInt offset=0"
_ENCODE = "str codec, Tensor x, SymInt key, SymInt offset, Tensor(a!)? residual"
_DECODE = "str codec, Tensor payload, SymInt numel, ScalarType dtype"
_REDUCE = (
    "str codec, Tensor[] payloads, SymInt numel, Tensor? local, SymInt position, SymInt divisor, str op, "
    "ScalarType dtype"
)
_REDUCE_ENCODE = f"{_REDUCE}, SymInt key, SymInt offset, Tensor(a!)? residual"


def _operator(
    name: str, arguments: str, run: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor] | None
) -> Any:
    """The operator of this name; without ``fake``, a tensor like its result, it returns nothing."""

    def without_result(*terms: Any) -> None:
        run(*terms)

    operator = torch.library.custom_op(
        f"dtcomm::{name}",
        run if fake else without_result,
        mutates_args=re.findall(r"!\)\??\s(\w+)", arguments),
        schema=f"({arguments}) -> {'Tensor' if fake else '()'}",
    )
    operator.register_fake(fake or (lambda *_: None))
    return operator


def _without_out(run: Callable[..., torch.Tensor], at: int) -> Callable[..., torch.Tensor]:
    """``run`` with None for its output, the argument number ``at``."""
    return lambda *terms: run(*terms[:at], None, *terms[at:])


def _fake_encoding(codec: str, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return _fake_payload(codec, x, x.numel(), x.dtype)


def _fake_decoding(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    calls.element_type("dtype", parse(codec), dtype)
    return payload.new_empty(numel, dtype=dtype)


def _fake_sum(codec: str, payloads: Any, numel: int, local: Any, *rest: Any) -> torch.Tensor:
    return _fake_decoding(codec, _first_term(payloads, local), numel, rest[3])


def _fake_encoded_sum(codec: str, payloads: Any, numel: int, local: Any, *rest: Any) -> torch.Tensor:
    return _fake_payload(codec, _first_term(payloads, local), numel, rest[3])


def _fake_quantized(codec: str, x: torch.Tensor, *_: Any) -> torch.Tensor:
    calls.element_type("x", parse(codec), x.dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


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


def _encode(
    codec: str,
    x: torch.Tensor,
    key: int = 0,
    offset: int = 0,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    decoded: torch.Tensor | None = None,
) -> torch.Tensor:
    return eager.encode(codec, x, _unsigned(key), _unsigned(offset), residual, out, decoded)


def _reduce(
    codec: str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int,
    divisor: int,
    op: str,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return eager.reduce(codec, payloads, numel, local, position, divisor, out, op, dtype)


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
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    decoded: torch.Tensor | None = None,
) -> torch.Tensor:
    words = _unsigned(key), _unsigned(offset)
    return eager.reduce_encode(
        codec, payloads, numel, local, position, divisor, residual, out, op, dtype, *words, decoded
    )


def _quantize(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    _encode(codec, x, key, offset, decoded=result)
    return result


encode = _operator("encode", _PLAIN, _encode, _fake_encoding)
encode_keep = _operator(
    "encode_keep",
    f"{_ENCODE}, Tensor(b!)? decoded",
    _without_out(_encode, 5),
    _fake_encoding,
)
encode_out = _operator("encode_out", f"{_ENCODE}, Tensor(b!) out, Tensor(c!)? decoded", _encode, None)
decode = _operator("decode", _DECODE, _without_out(eager.decode, 4), _fake_decoding)
decode_out = _operator("decode_out", f"{_DECODE}, Tensor(a!) out", eager.decode, None)
reduce = _operator("reduce", _REDUCE, _reduce, _fake_sum)
reduce_out = _operator("reduce_out", f"{_REDUCE}, Tensor(a!) out", _reduce, None)
reduce_encode = _operator(
    "reduce_encode",
    f"{_REDUCE}, SymInt key=0, SymInt offset=0",
    _reduce_encode,
    _fake_encoded_sum,
)
reduce_encode_keep = _operator(
    "reduce_encode_keep",
    f"{_REDUCE_ENCODE}, Tensor(b!)? decoded",
    _without_out(_reduce_encode, 11),
    _fake_encoded_sum,
)
reduce_encode_out = _operator(
    "reduce_encode_out",
    f"{_REDUCE_ENCODE}, Tensor(b!) out, Tensor(c!)? decoded",
    _reduce_encode,
    None,
)
quantize = _operator("quantize", _PLAIN, _quantize, _fake_quantized)
quantize.register_autograd(lambda context, gradient: (None, gradient, None, None))


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
