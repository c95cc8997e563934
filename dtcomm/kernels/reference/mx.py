"""Codecs mxfp8 and mxfp4 (OCP Microscaling): blocks of 32 with a common power of two."""

from __future__ import annotations

import numpy as np

from dtcomm.codecs.mx import MX_BLOCK, Mx
from dtcomm.kernels.reference.floats import NAN, Bytes, Floats, canonical
from dtcomm.kernels.reference.minifloat import FORMATS
from dtcomm.kernels.reference.scales import rows_of

_BIAS = 127  # of a scale's exponent
_NAN = 255


def encode(codec: Mx, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding."""
    form = FORMATS[codec.element]
    rows = rows_of(x, MX_BLOCK).astype(np.float64)  # in which scaling by any power of two is exact
    top = np.abs(rows).max(axis=1)
    bad = ~np.isfinite(top)
    top = np.where(bad, 1.0, top)
    floor_log2 = np.frexp(top)[1] - 1
    largest = int(np.frexp(form.sizes[-1])[1]) - 1
    scale = np.where(top > 0, np.maximum(floor_log2 - largest + _BIAS, 0), 0)
    scale = np.where(bad, _NAN, scale)
    usable = ((scale > 0) & ~bad)[:, None]
    codes = form.nearest(np.where(usable, np.ldexp(rows, _BIAS - scale[:, None]), 0.0))
    codes.reshape(-1)[len(x) :] = 0
    if codec.code_bits == 4:
        pairs = codes.reshape(-1, 2)
        codes = pairs[:, 0] | pairs[:, 1] << np.uint8(4)
    return np.concatenate([scale.astype(np.uint8), codes.reshape(-1)])


def decode(codec: Mx, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    layout = codec.layout()
    raw, codes = granule[: layout.codes_at(n)], granule[layout.codes_at(n) : layout.used(n)]
    scale = np.where(raw == _NAN, NAN, np.ldexp(np.float32(1), raw.astype(np.int32) - _BIAS))
    if codec.code_bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=1)
    values = FORMATS[codec.element].table[codes.reshape(-1, MX_BLOCK)]
    return canonical(values * scale.astype(np.float32)[:, None]).reshape(-1)[:n]
