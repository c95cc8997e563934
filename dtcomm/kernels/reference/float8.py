"""Codecs fp8_e4m3 and fp8_e5m2: 8-bit floats with a scale per block."""

from __future__ import annotations

import numpy as np

from dtcomm.codecs import Float8
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference.floats import Bytes, Floats, canonical, magnitude
from dtcomm.kernels.reference.minifloat import FORMATS
from dtcomm.kernels.reference.scales import block_scale, inverse, load_fields, rows_of, store_fields


def encode(codec: Float8, x: Floats, key: int, index: int, feedback: bool) -> Bytes:
    """One granule, without its padding."""
    form, rows = FORMATS[codec.element], rows_of(x, codec.block)
    # A stochastic code would be clipped where the scale is too small: round it up.
    up = codec.round == "stochastic"
    scale = block_scale(magnitude(rows).max(axis=1), float(form.sizes[-1]), codec.scale, up=up)
    usable = (scale > 0)[:, None]
    t = np.where(usable, rows * inverse(scale)[:, None], np.float32(0))
    if codec.round == "nearest":
        codes = form.nearest(t)
    else:
        codes = form.stochastic(t, counter_rng.uniform(key, index, t.size).reshape(t.shape))
    codes.reshape(-1)[len(x) :] = 0
    return np.concatenate([store_fields(scale, codec.scale), codes.reshape(-1)])


def decode(codec: Float8, granule: Bytes, n: int) -> Floats:
    """The `n` floats of one granule."""
    layout = codec.layout()
    scale = load_fields(granule[: layout.codes_at(n)], codec.scale)
    codes = granule[layout.codes_at(n) : layout.used(n)].reshape(-1, layout.block)
    return canonical(FORMATS[codec.element].table[codes] * scale[:, None]).reshape(-1)[:n]
