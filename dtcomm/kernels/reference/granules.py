"""Whole payloads: casts in one go, every other codec granule by granule.

The functions for a granule are `encode` and `decode` of the module that the codec names (`Codec.reference`):

    encode(codec, x, key, index, feedback): The bytes of one granule without its padding. `index` is the index of its
        first element in the caller's tensor; `feedback` states that the error goes to a residual.
    decode(codec, granule, n): The n floats of one granule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch

from dtcomm.codecs import Codec
from dtcomm.kernels.reference import float8, integer, mx, reproducible, sign, sparse
from dtcomm.kernels.reference.floats import Bytes, Floats, narrow, widen


class GranuleFunctions(Protocol):
    """A module of this package with the arithmetic of a codec."""

    encode: Callable[[Any, Floats, int, int, bool], Bytes]
    decode: Callable[[Any, Bytes, int], Floats]


_MODULES: Mapping[str, GranuleFunctions] = {
    module.__name__.rpartition(".")[2]: cast(GranuleFunctions, module)
    for module in (float8, integer, mx, reproducible, sign, sparse)
}


def encode(
    codec: Codec, x: Floats, dtype: torch.dtype, key: int, offset: int, *, feedback: bool = False
) -> Bytes:
    """The payload of `x`, without the padding after a cast's last granule."""
    wire_dtype = codec.wire_dtype(dtype)
    if wire_dtype is not None:
        return narrow(wire_dtype, x)
    module, layout = _MODULES[codec.reference], codec.layout()
    granules = [np.zeros(0, np.uint8)]
    for start in range(0, len(x), layout.granule):
        granule = module.encode(codec, x[start : start + layout.granule], key, offset + start, feedback)
        granules.append(np.pad(granule, (0, -len(granule) % 16)))
    return np.concatenate(granules)


def decode(codec: Codec, payload: Bytes, numel: int, dtype: torch.dtype) -> Floats:
    """The `numel` floats of a payload."""
    wire_dtype = codec.wire_dtype(dtype)
    if wire_dtype is not None:
        return widen(wire_dtype, payload[: numel * wire_dtype.itemsize])
    module, layout = _MODULES[codec.reference], codec.layout()
    parts, at = [np.zeros(0, np.float32)], 0
    for start in range(0, numel, layout.granule):
        n = min(layout.granule, numel - start)
        parts.append(module.decode(codec, payload[at : at + layout.bytes(n)], n))
        at += layout.bytes(n)
    return np.concatenate(parts)
