"""Whole payloads: casts in one go, every other family granule by granule through its two functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtcomm.codecs import Bf16, Codec, Exact, Float8, Fp16, Integer, Mxfp8, RandK, Sign, TopK
from dtcomm.kernels.reference import float8, integer, mx, reproducible, sign, sparse
from dtcomm.kernels.reference.floats import Bytes, Floats, narrow, widen


@dataclass(frozen=True, kw_only=True)
class Family:
    """encode(codec, x, key, index, feedback): the bytes of one granule, whose first element has that index in
    the caller's tensor, without the padding; `feedback`: its error goes to a residual. decode(codec, granule, n).
    """

    encode: Callable[[Any, Floats, int, int, bool], Bytes]
    decode: Callable[[Any, Bytes, int], Floats]


FAMILIES: dict[int, Family] = {
    Integer.family: Family(encode=integer.encode, decode=integer.decode),
    Float8.family: Family(encode=float8.encode, decode=float8.decode),
    Mxfp8.family: Family(encode=mx.encode, decode=mx.decode),
    Sign.family: Family(encode=sign.encode, decode=sign.decode),
    TopK.family: Family(encode=sparse.encode_topk, decode=sparse.decode_topk),
    RandK.family: Family(encode=sparse.encode_randk, decode=sparse.decode_randk),
    Exact.family: Family(encode=reproducible.encode, decode=reproducible.decode),
}


def encode(
    codec: Codec, x: Floats, dtype: torch.dtype, key: int, offset: int, *, feedback: bool = False
) -> Bytes:
    """The payload of `x`, without the padding after a cast's last granule."""
    family = FAMILIES.get(codec.family)
    if family is None:
        return narrow(wire_type(codec, dtype), x)
    layout = codec.layout()
    granules = [np.zeros(0, np.uint8)]
    for start in range(0, len(x), layout.granule):
        granule = family.encode(codec, x[start : start + layout.granule], key, offset + start, feedback)
        granules.append(np.pad(granule, (0, -len(granule) % 16)))
    return np.concatenate(granules)


def decode(codec: Codec, payload: Bytes, numel: int, dtype: torch.dtype) -> Floats:
    """The `numel` floats of a payload."""
    family = FAMILIES.get(codec.family)
    if family is None:
        wire = wire_type(codec, dtype)
        return widen(wire, payload[: numel * wire.itemsize])
    layout = codec.layout()
    parts, at = [np.zeros(0, np.float32)], 0
    for start in range(0, numel, layout.granule):
        n = min(layout.granule, numel - start)
        parts.append(family.decode(codec, payload[at : at + layout.bytes(n)], n))
        at += layout.bytes(n)
    return np.concatenate(parts)


def wire_type(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """The type of an element in a cast's payload."""
    if isinstance(codec, Fp16):
        return torch.float16
    return torch.bfloat16 if isinstance(codec, Bf16) else dtype
