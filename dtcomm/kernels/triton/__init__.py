"""The Triton kernels, for CUDA devices without a compiled `_cuda`, and for CPU tensors under TRITON_INTERPRET=1.

They run fp16, bf16, int8, int4, fp8_e4m3 and fp8_e3m4; :func:`supports` tests a codec. This file has the constants of
codecs with which they are compiled. `launch` runs calls: it imports Triton, which takes longer to import than dtcomm.
"""

from __future__ import annotations

import os
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from dtcomm.codecs import Codec, Float8, Integer


@cache
def installed() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. Triton decides it when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def supports(codec: Codec) -> bool:
    """Whether the kernels run `codec`."""
    return (codec.elementwise and codec.name != "none") or rules_of(codec) is not None


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
