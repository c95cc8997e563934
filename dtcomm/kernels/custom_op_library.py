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

import torch

from dtcomm.codecs import Codec
from dtcomm.kernels import checks, custom_ops


def quantize(codec: Codec | str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    """decode(encode(x)), of the shape and type of x, in one pass; its gradient goes to x as it is.

    Raises TypeError or ValueError naming the argument.
    """
    return _fresh(custom_ops.quantize(_spec(codec), x, _signed("key", key), _signed("offset", offset)))


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
        custom_ops.encode_out(spec, x, *words, residual, out, decoded)
        return out
    if residual is not None or decoded is not None:
        return _fresh(custom_ops.encode_keep(spec, x, *words, residual, decoded))
    return _fresh(custom_ops.encode(spec, x, *words))


def compiled_decode(
    codec: Codec | str, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.decode` as an operator."""
    if out is None:
        return _fresh(custom_ops.decode(_spec(codec), payload, numel, dtype))
    custom_ops.decode_out(_spec(codec), payload, numel, dtype, out)
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
        return _fresh(custom_ops.reduce(spec, payloads, numel, local, position, divisor, op, dtype))
    custom_ops.reduce_out(spec, payloads, numel, local, position, divisor, op, dtype, out)
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
        custom_ops.reduce_encode_out(*terms, residual, out, decoded)
        return out
    if residual is not None or decoded is not None:
        return _fresh(custom_ops.reduce_encode_keep(*terms, residual, decoded))
    return _fresh(custom_ops.reduce_encode(*terms))


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
