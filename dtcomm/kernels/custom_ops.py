"""torch's operators `dtcomm::*`: what they compute, then what torch is told of them without computing.

A codec is its spec string; `key` and `offset` are the signed integers of 64 bits without a sign. library.py has the
functions that call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtcomm.codecs import codec as parse
from dtcomm.kernels import checks, ops


@torch.library.custom_op("dtcomm::encode", mutates_args=())
def encode(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    return ops.encode(codec, x, _unsigned(key), _unsigned(offset))


@torch.library.custom_op("dtcomm::encode_keep", mutates_args=("residual", "decoded"))
def encode_keep(
    codec: str,
    x: torch.Tensor,
    key: int,
    offset: int,
    residual: torch.Tensor | None,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    return ops.encode(codec, x, _unsigned(key), _unsigned(offset), residual, decoded=decoded)


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
    ops.encode(codec, x, _unsigned(key), _unsigned(offset), residual, out, decoded=decoded)


@torch.library.custom_op("dtcomm::decode", mutates_args=())
def decode(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ops.decode(codec, payload, numel, dtype)


@torch.library.custom_op("dtcomm::decode_out", mutates_args=("out",))
def decode_out(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    ops.decode(codec, payload, numel, dtype, out)


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
    return ops.reduce(codec, payloads, numel, local, position, divisor, op=op, dtype=dtype)


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
    ops.reduce(codec, payloads, numel, local, position, divisor, out, op=op, dtype=dtype)


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
def quantize(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops.encode(codec, x, _unsigned(key), _unsigned(offset), decoded=result)
    return result


@encode.register_fake
@encode_keep.register_fake
def _(codec: str, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return _fake_payload(codec, x, x.numel(), x.dtype)


@decode.register_fake
def _(codec: str, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    checks.element_type("dtype", parse(codec), dtype)
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
    checks.element_type("dtype", parse(codec), dtype)
    return _beside(payloads, local).new_empty(numel, dtype=dtype)


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
    return _fake_payload(codec, _beside(payloads, local), numel, dtype)


@encode_out.register_fake
@decode_out.register_fake
@reduce_out.register_fake
@reduce_encode_out.register_fake
def _(*_: Any, **__: Any) -> None:
    """Nothing is returned, and what is written into has its size."""


@quantize.register_fake
def _(codec: str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    checks.element_type("x", parse(codec), x.dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _straight_through(context: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
    return None, gradient, None, None


quantize.register_autograd(_straight_through)


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


def _unsigned(word: int) -> int:
    return word + 2**64 if word < 0 else word
