"""The constants of codecs with which the Triton kernels are compiled."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dtcomm.codecs import Codec, Float8, Integer


class Rules(NamedTuple):
    """The constants of a codec with a scale per block.

    granule and block are counted in elements; bytes are those of a whole granule; fields are scales and zero points per
    block.
    """

    mantissa: int  # bits of a float's mantissa; 0: codes are integers
    normal: int  # bits of the smallest normal number of a float
    bits: int  # of a code
    levels: float  # the largest code
    cap: int  # bits of the largest scale whose product with `levels` is finite
    narrow: bool  # scales are bf16
    symmetric: bool
    up: bool  # scales are rounded up
    stochastic: bool
    block: int
    granule: int
    bytes: int
    field_bytes: int
    fields: int


@lru_cache(maxsize=256)
def rules_of(codec: Codec) -> Rules | None:
    """The constants of `codec`; None if the kernels do not support it."""
    rotate, spikes = codec.native()[5:7]
    if rotate or spikes:
        return None
    if isinstance(codec, Integer) and codec.bits in (4, 8):
        return _rules(codec, float(codec.levels), codec.symmetric)
    if isinstance(codec, Float8) and codec.element == "e4m3":
        return _rules(codec, 448.0, True, mantissa=3, least=2.0**-6)
    if isinstance(codec, Float8) and codec.element == "e3m4":
        return _rules(codec, 30.0, True, mantissa=4, least=2.0**-2)
    return None


def _rules(
    codec: Integer | Float8, levels: float, symmetric: bool, *, mantissa: int = 0, least: float = 1.0
) -> Rules:
    """`least`: the smallest normal number of a float."""
    layout = codec.layout()
    narrow, stochastic = codec.scale == "bf16", codec.round == "stochastic"
    return Rules(
        mantissa=mantissa,
        normal=int(np.float32(least).view(np.int32)),
        bits=layout.code_bits,
        levels=levels,
        cap=_cap(levels, narrow),
        narrow=narrow,
        symmetric=symmetric,
        up=stochastic or not symmetric,
        stochastic=stochastic,
        block=codec.block,
        granule=layout.granule,
        bytes=layout.bytes(layout.granule),
        field_bytes=layout.field_bytes,
        fields=layout.fields,
    )


def _cap(levels: float, narrow: bool) -> int:
    """The bits of the largest value of the scale's type whose product with `levels` is finite."""
    most = np.float32(levels)
    cap = np.finfo(np.float32).max / most
    with np.errstate(over="ignore"):
        while np.isinf(cap * most):
            cap = np.nextafter(cap, np.float32(0))
    bits = int(cap.view(np.uint32))
    return bits & 0xFFFF0000 if narrow else bits
